from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from quire.types import sampling
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams, check_vocabulary


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stops, params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ((), (), (), None)
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.spaces_between_special_tokens


def test_every_field_is_checked() -> None:
    assert sampling._CHECKS.keys() == {item.name for item in dataclasses.fields(SamplingParams)}


def test_every_default_passes_its_own_check_unchanged() -> None:
    for item in dataclasses.fields(SamplingParams):
        checked = sampling._CHECKS[item.name](item.name, item.default)
        assert checked == item.default
        assert type(checked) is type(item.default)


def test_a_value_that_equals_a_default_is_still_checked_for_its_kind() -> None:
    for name, value in (("n", True), ("n", 1.0), ("top_k", False), ("ignore_eos", 0), ("stop", b"")):
        with pytest.raises(InvalidRequest, match=f"^{name}:"):
            SamplingParams(**{name: value})
    assert type(SamplingParams(temperature=1).temperature) is float


TRUSTED = [
    SamplingParams(),
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(stop=["a"], logit_bias={3: 1.0}, seed=5, logprob_token_ids=[7], best_of=3, rank_by="sum"),
    SamplingParams(repetition_detection={"max_pattern_size": 4}, structured_outputs={"json": {"type": "object"}}),
]


@pytest.mark.parametrize("params", TRUSTED)
def test_trusted_values_make_an_equal_instance_and_no_check_is_run(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_CHECKS", {})
    monkeypatch.setattr(sampling, "_check_together", None)
    made = SamplingParams.trusted(**params.changed_fields())
    assert made == params
    assert repr(made) == repr(params)


def test_a_trusted_instance_still_refuses_a_field_it_does_not_know() -> None:
    with pytest.raises(InvalidRequest, match="^beam_width: is no sampling parameter"):
        SamplingParams.trusted(temperature=0.5, beam_width=2)


def test_only_fields_that_differ_from_their_defaults_count_as_changed() -> None:
    assert SamplingParams(temperature=1.0, top_k=5, stop=[], seed=-1, logprobs=None).changed_fields() == {"top_k": 5}
    assert SamplingParams(logprob_token_ids=[4]).changed_fields() == {"logprobs": 0, "logprob_token_ids": (4,)}


@pytest.mark.parametrize("count", [1, 3, 127, 128, 5_000])
@pytest.mark.parametrize("token", [-1, 1_000, 2**31, 2**32, 2**70])
def test_a_token_outside_the_vocabulary_is_named_wherever_it_stands(count: int, token: int) -> None:
    for place in {0, count // 2, count - 1}:
        ids = [999] * count
        ids[place] = token
        for given in (ids, tuple(ids), iter(ids), dict.fromkeys(ids)):
            with pytest.raises(InvalidRequest, match=rf"^prompt: names token {token}, outside the vocabulary"):
                check_vocabulary("prompt", given, 1_000)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 5_000])
def test_tokens_of_the_vocabulary_pass(count: int) -> None:
    for ids in ([0, 999, 5] * count, np.arange(count, dtype=np.int32) % 1_000):
        check_vocabulary("prompt", ids, 1_000)  # type: ignore[arg-type]


def test_equal_arguments_make_equal_params_however_they_are_written() -> None:
    written = SamplingParams(stop="end", stop_token_ids=[3, 3, 4], top_k=-1, logit_bias={"7": 1}, seed=-1)  # type: ignore[dict-item]
    meant = SamplingParams(stop=["end"], stop_token_ids=(3, 4), top_k=0, logit_bias={7: 1.0}, seed=None)
    assert written == meant
    assert hash(written) == hash(meant)
    assert repr(written) == repr(meant)
    assert "stop_token_ids=(3, 4)" in repr(written)


def test_a_changed_copy_is_validated_again_and_leaves_the_original_alone() -> None:
    params = SamplingParams(temperature=0.8, stop="end", logit_bias={1: 2.0})
    changed = dataclasses.replace(params, temperature=0.0)
    assert changed.is_greedy
    assert not params.is_greedy
    assert changed.stops == ("end",)
    with pytest.raises(InvalidRequest, match="temperature"):
        dataclasses.replace(params, temperature=-1)


def test_what_a_caller_does_to_a_list_afterwards_changes_nothing() -> None:
    ids, bias = [1, 2], {1: 1.0}
    params = SamplingParams(allowed_token_ids=ids, logit_bias=bias)
    ids.append(3)
    bias[2] = 9.0
    assert params.allowed_token_ids == (1, 2)
    assert params.logit_bias == {1: 1.0}


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop_token_ids == (1, 2)
    assert all(type(token) is int for token in params.stop_token_ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.0),
        ("n", True),
        ("n", None),
        ("n", 16_385),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", math.inf),
        ("seed", -2),
        ("seed", 2**64),
        pytest.param("seed", 10**5000, id="seed-huge"),
        pytest.param("stop_token_ids", [10**5000], id="stop_token_ids-huge"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop", [str(i) for i in range(1_025)]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", "12"),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", [str(i) for i in range(1_001)]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {"one": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -math.inf}),
        ("logit_bias", {1: "1"}),
        ("ignore_eos", 1),
        ("ignore_eos", "false"),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("logprobs", True),
        ("logprobs", 1_001),
        ("prompt_logprobs", -2),
        ("logprob_token_ids", 5),
        ("logprob_token_ids", [-1]),
        ("logprob_token_ids", ["7"]),
        ("logprob_token_ids", list(range(1_025))),
        ("detokenize", None),
    ],
)
def test_a_bad_value_is_refused_in_one_short_line_that_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_naming_tokens_for_logprobs_implies_logprobs() -> None:
    assert SamplingParams().logprob_token_ids == ()
    assert SamplingParams(logprob_token_ids=[4, 4, 5]) == SamplingParams(logprobs=0, logprob_token_ids=(4, 5))
    assert SamplingParams(logprob_token_ids=[4], logprobs=3).logprobs == 3


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens: is 20, above max_tokens=16"):
        SamplingParams(min_tokens=20)
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(stop="end", detokenize=False)
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20


def test_unknown_names_and_positional_arguments_are_errors() -> None:
    with pytest.raises(InvalidRequest, match=r"^temprature: is no sampling parameter; did you mean temperature\?"):
        SamplingParams(temprature=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[misc]


def test_params_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
