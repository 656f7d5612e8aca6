"""Structured output from the prompt to the answer: a tiny model with random weights, the real engine and runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.types.errors import InvalidRequest
from quire.types.output import RequestOutput
from tiny_served import write_tiny_model

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d"
CHOICES = ["yes", "no", "don't know"]
SUM = 'root ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" root ")"'
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "regex": {"regex": DATE},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": SUM},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_length=512)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, load_format="dummy", dtype="float32", threads=1, kv_cache_memory="8MiB") as made:
        yield made


def check(kind: str, text: str) -> None:
    if kind == "json":
        jsonschema.validate(json.loads(text), PERSON)
    elif kind == "regex":
        assert re.fullmatch(DATE, text)
    elif kind == "choice":
        assert text in CHOICES
    else:
        assert re.fullmatch(r"[0-9+()]+", text)
        assert text.count("(") == text.count(")")


def asked(kind: str, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 200, "structured_outputs": KINDS[kind]}
    return SamplingParams(**{**fields, **changes})


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [tuple(sample.token_ids) for sample in output.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_every_finished_answer_is_what_was_asked_for(llm: LLM, kind: str) -> None:
    outputs = llm.generate(["a", "bc", "def"] * 3, [asked(kind, seed=seed) for seed in range(9)])
    ended = [sample for output in outputs for sample in output.outputs if sample.finish_reason == "stop"]
    assert len(ended) >= 5
    for sample in ended:
        check(kind, sample.text)


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(llm: LLM) -> None:
    sampling = [asked(kind, seed=seed) for seed in range(3) for kind in KINDS]
    sampling += [asked("regex", n=3), asked("choice", temperature=0.0)]
    sampling += [SamplingParams(temperature=1.0, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(4)]
    prompts = [f"prompt {place}" for place in range(len(sampling))]
    together = llm.generate(prompts, sampling)
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(prompts, sampling, strict=True)]
    assert [tokens(output) for output in together] == [tokens(output) for output in alone]


def test_samples_of_one_request_follow_the_grammar_each_on_its_own(llm: LLM) -> None:
    (output,) = llm.generate("a date", asked("regex", n=6))
    texts = [sample.text for sample in output.outputs]
    for text in texts:
        check("regex", text)
    assert len(set(texts)) > 1


def test_preempted_answers_stay_the_same(folder: Path, llm: LLM) -> None:
    sampling = [asked("json", seed=seed) for seed in range(3)]
    sampling += [asked("regex", seed=seed, structured_outputs={"regex": "([a-c]{3}-){20,30}"}) for seed in range(4)]
    prompts = [f"prompt {place}" for place in range(len(sampling))]
    wanted = [tokens(output) for output in llm.generate(prompts, sampling)]
    small = {"num_kv_blocks": 14, "block_size": 16, "max_model_len": 224}
    with LLM(folder, load_format="dummy", dtype="float32", threads=1, **small) as tight:
        assert [tokens(output) for output in tight.generate(prompts, sampling)] == wanted
        assert tight.stats().preemptions > 0


def test_tokens_that_are_forced_cost_fewer_steps(llm: LLM) -> None:
    text = "the one and only answer that may be given here"
    before = llm.stats().steps
    (output,) = llm.generate("say it", asked("choice", structured_outputs={"choice": [text]}))
    assert output.outputs[0].text == text
    assert llm.stats().steps - before < len(text) / 3


def test_an_answer_that_is_cut_short_says_so(llm: LLM) -> None:
    (output,) = llm.generate("a", asked("json", max_tokens=5))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 5


def test_an_answer_that_is_complete_with_its_last_allowed_token_ends_by_its_grammar(folder: Path, llm: LLM) -> None:
    def answers(made: LLM) -> list[tuple[int, str | None]]:
        fields = {"structured_outputs": {"regex": "[a-c]{4}"}}
        whole = made.generate(["a"] * 4, asked("regex", **fields))
        cut = [asked("regex", **fields, max_tokens=len(each.outputs[0].token_ids)) for each in whole]
        ended = [output.outputs[0] for output in made.generate(["a"] * 4, cut)]
        return [(len(sample.token_ids), sample.finish_reason) for sample in ended]

    ran_ahead = answers(llm)
    assert {reason for _, reason in ran_ahead} == {"stop"}
    guess = {"speculative_config": {"method": "ngram"}, "kv_cache_memory": "8MiB"}  # its rows with grammars are paced
    with LLM(folder, load_format="dummy", dtype="float32", threads=1, **guess) as paced:
        assert answers(paced) == ran_ahead


def test_with_eos_ignored_an_answer_ends_where_the_grammar_does(llm: LLM) -> None:
    (output,) = llm.generate("a", asked("regex", structured_outputs={"regex": "[ab]{1,9}"}, ignore_eos=True))
    assert len(output.outputs[0].text) == 9
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_stop_strings_and_stop_tokens_end_an_answer_before_its_grammar(llm: LLM) -> None:
    (output,) = llm.generate("a", asked("regex", stop=["-"], include_stop_str_in_output=True))
    assert re.fullmatch(r"(19|20)\d\d-", output.outputs[0].text)
    dash = llm.tokenizer.encode("-")[0]
    (output,) = llm.generate("a", asked("regex", stop_token_ids=[dash]))
    assert output.outputs[0].stop_reason == dash


def test_a_request_whose_other_rules_leave_no_token_fails_alone(llm: LLM) -> None:
    nothing = asked("choice", allowed_token_ids=llm.tokenizer.encode("z"))
    failed, answered = llm.generate(["a", "b"], [nothing, asked("choice")])
    assert failed.outputs[0].finish_reason == "error"
    check("choice", answered.outputs[0].text)


def test_a_bad_schema_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().steps
    with pytest.raises(InvalidRequest, match="structured_outputs.json: .*thing"):
        llm.generate(["a", "b"], [asked("regex"), asked("json", structured_outputs={"json": {"type": "thing"}})])
    assert llm.stats().steps == before


def test_without_a_tokenizer_structured_outputs_are_refused_by_name(folder: Path) -> None:
    bare = {"skip_tokenizer_init": True, "kv_cache_memory": "8MiB"}
    made = LLM(folder, load_format="dummy", dtype="float32", threads=1, **bare)
    with made, pytest.raises(InvalidRequest, match="structured_outputs"):
        made.generate([[1, 2]], asked("regex", detokenize=False))


def test_beams_find_the_likeliest_of_all_texts_the_grammar_allows(llm: LLM) -> None:
    texts = ["yes", "no", "perhaps", "never", "always"]
    params = BeamSearchParams(64, max_tokens=20, n=5, length_penalty=0.0, structured_outputs={"choice": texts})
    (found,) = llm.beam_search("Will it rain? ", params)
    assert sorted(beam.text.removeprefix("Will it rain? ") for beam in found.sequences) == sorted(texts)
    scores = [beam.cumulative_logprob for beam in found.sequences]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("kind", ["regex", "choice", "grammar"])
def test_every_finished_beam_is_what_was_asked_for(llm: LLM, kind: str) -> None:
    params = BeamSearchParams(4, max_tokens=60, length_penalty=-1.0, structured_outputs=KINDS[kind])  # short ones win
    (found,) = llm.beam_search("a", params)
    ended = [beam for beam in found.sequences if beam.finish_reason == "stop"]
    for beam in ended:
        check(kind, beam.text.removeprefix("a"))
    assert ended


def test_the_best_of_several_is_what_was_asked_for(llm: LLM) -> None:
    (output,) = llm.generate("a", asked("regex", n=2, best_of=6))
    assert len(output.outputs) == 2
    for sample in output.outputs:
        check("regex", sample.text)


def test_guessing_ahead_does_not_change_an_answer(folder: Path, llm: LLM) -> None:
    sampling = [asked(kind, seed=seed, temperature=0.3) for seed in range(3) for kind in KINDS]
    prompts = ['{"name": "a", "age": 1, "tags": ["red", "red"]}' * 2 for _ in sampling]
    wanted = [tokens(output) for output in llm.generate(prompts, sampling)]
    guess = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "kv_cache_memory": "8MiB"}
    with LLM(folder, load_format="dummy", dtype="float32", threads=1, **guess) as made:
        assert [tokens(output) for output in made.generate(prompts, sampling)] == wanted
