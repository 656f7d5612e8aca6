"""Stop strings, whatever the pieces the text comes in."""

from __future__ import annotations

import random

import pytest

from quire.serving.text.stop_strings import MAX_STOP_CHARACTERS, StopMatch, StopStrings
from quire.types.errors import InvalidRequest


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character: the first completed stop string ends the text, the longest if several do."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(text: str, stops: list[str], include: bool, rng: random.Random) -> tuple[list[str], str | None]:
    watcher, pieces, place = StopStrings(stops, include), [], 0
    while place < len(text):
        size = rng.randrange(1, 6)
        found = watcher.push(text[place : place + size])
        place += size
        if isinstance(found, StopMatch):
            return [*pieces, found.text], found.stop
        pieces.append(found)
    return [*pieces, watcher.finish()], None


def test_any_cutting_of_the_text_ends_where_the_whole_text_would() -> None:
    rng = random.Random(0)
    for _ in range(8_000):
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        text = "".join(rng.choice("ab\nc") for _ in range(rng.randrange(30)))
        include = rng.random() < 0.5
        pieces, stop = run(text, stops, include, rng)
        assert ("".join(pieces), stop) == naive(text, stops, include)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    watcher = StopStrings(["</end>"])
    assert watcher.push("hi <") == "hi "
    assert watcher.push("/en") == ""
    assert watcher.push("x") == "</enx"
    assert watcher.push("</end") == ""
    assert watcher.push(">tail") == StopMatch("", "</end>")


def test_what_was_held_back_comes_out_when_the_text_ends() -> None:
    watcher = StopStrings(["STOP"])
    assert watcher.push("a ST") == "a "
    assert watcher.finish() == "ST"


def test_only_as_much_as_could_still_match_is_held_back() -> None:
    watcher = StopStrings(["aab"])
    assert [watcher.push("a") for _ in range(4)] == ["", "", "a", "a"]
    assert watcher.push("b") == StopMatch("", "aab")


def test_the_stop_string_is_kept_when_asked() -> None:
    assert StopStrings(["b"], include_in_output=True).push("abc") == StopMatch("ab", "b")
    assert StopStrings(["b"]).push("abc") == StopMatch("a", "b")


def test_the_first_to_be_completed_wins_and_then_the_longest() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcd") == StopMatch("xa", "bc")
    assert StopStrings(["c", "bc", "abc"]).push("xabc") == StopMatch("x", "abc")


def test_after_a_match_nothing_more_comes_out() -> None:
    watcher = StopStrings(["b"])
    watcher.push("ab")
    assert watcher.push("more") == StopMatch("", "b")
    assert watcher.finish() == ""


def test_without_stop_strings_text_passes_untouched() -> None:
    watcher = StopStrings([])
    assert watcher.push("anything") == "anything"
    assert watcher.finish() == ""


def test_empty_and_oversized_stop_strings_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop: must hold non-empty strings"):
        StopStrings(["a", ""])
    with pytest.raises(InvalidRequest, match=f"limit {MAX_STOP_CHARACTERS}"):
        StopStrings(["a" * (MAX_STOP_CHARACTERS + 1)])
