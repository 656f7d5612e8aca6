"""Stop strings found in the bytes of tokens."""

from __future__ import annotations

import pytest

from quire.engine.decoding.stop_text import StopRules, StopText
from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import SamplingParams, TokenRules

WORDS = [b"a", b"b", b"ab", b"c", "é".encode()[:1], "é".encode()[1:], b"<end>", b"<eos>"]
VOCABULARY = Vocabulary(WORDS, frozenset({7}), (7,), lambda text: [])


def found(tokens: list[int], stop: list[str], **params: object) -> tuple[int, str] | None:
    """After how many tokens which stop string is found."""
    sampling = SamplingParams(stop=stop, **params)  # type: ignore[arg-type]
    text = StopText(StopRules.of(sampling, TokenRules(end_ids=(6,)), VOCABULARY))
    for count, token in enumerate(tokens, 1):
        text, name = text.push(token)
        if name is not None:
            return count, name
    return None


@pytest.mark.parametrize(
    ("tokens", "stop", "wanted"),
    [
        ([0, 1, 3], ["bc"], (3, "bc")),
        ([2, 2, 3], ["abab"], (2, "abab")),
        ([0, 0, 1], ["aab"], (3, "aab")),
        ([4, 5, 0], ["é"], (2, "é")),
        ([0, 1], ["c"], None),
        ([2], ["b", "ab"], (1, "ab")),
        ([2, 3], ["abc", "b"], (1, "b")),
        ([3] * 50 + [2], ["ccab"], (51, "ccab")),
    ],
)
def test_the_string_that_is_completed_first_is_found_across_tokens(
    tokens: list[int], stop: list[str], wanted: tuple[int, str] | None
) -> None:
    assert found(tokens, stop) == wanted


def test_text_before_min_tokens_is_not_looked_at() -> None:
    assert found([0, 1, 0, 1], ["ab"], min_tokens=2) == (4, "ab")
    assert found([0, 1], ["ab"], min_tokens=1) is None


def test_special_tokens_and_those_that_end_a_request_are_no_text() -> None:
    assert found([7], ["eos"]) is None
    assert found([7], ["eos"], skip_special_tokens=False) == (1, "eos")
    assert found([6], ["end"]) is None
    assert found([6], ["end"], include_stop_str_in_output=True) == (1, "end")
    assert found([0, 99, 1], ["ab"]) == (3, "ab")


def test_a_fork_goes_its_own_way() -> None:
    text = StopText(StopRules.of(SamplingParams(stop=["ab"]), TokenRules(), VOCABULARY))
    text, _ = text.push(0)
    other, missed = text.push(3)
    assert missed is None
    assert text.push(1)[1] == "ab"
    assert other.push(1)[1] is None
