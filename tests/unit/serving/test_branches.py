"""The offline API for groups and branches: beam_search, best_of, start, fork."""

from __future__ import annotations

from typing import Any

import pytest

from quire import BeamSearchParams, InvalidRequest, LiveRequest, QuireError, SamplingParams
from tests.unit.serving.conftest import MakeLLM
from tests.unit.serving.scripted import ids

STORY = "once upon a time"
LONG = SamplingParams(max_tokens=40)


def script(prompt: str, index: int) -> str:
    """The story, from wherever the prompt has come to."""
    _, _, told = prompt.partition(":")
    return STORY[len(told) :] if STORY.startswith(told) else f" and so on {index}"


# ---------------------------------------------------------------------------------------------------- beams, best_of
def test_a_beam_search_returns_sequences_best_first_with_the_prompt_before_them(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    params = BeamSearchParams(beam_width=3, max_tokens=40)
    first, second = llm.beam_search(["x:", {"prompt_token_ids": ids("y:once")}], params)
    best = first.sequences[0]
    assert (best.text, best.output_text) == (f"x:{STORY}", STORY)
    assert best.tokens == [*ids("x:"), *best.output_token_ids]
    assert best.cumulative_logprob == best.cum_logprob == pytest.approx(-0.1 * len(best.output_token_ids))
    assert best.score == pytest.approx(-0.1)
    assert len(first.sequences) == 3
    assert [one.score for one in first.sequences] == sorted((one.score for one in first.sequences), reverse=True)
    assert second.sequences[0].output_text == STORY.removeprefix("once")


def test_a_search_may_return_fewer_and_end_at_stop_strings(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    params = BeamSearchParams(4, 40, n=1, stop=" a", early_stopping=True, length_penalty=0.0)
    ((only,),) = [output.sequences for output in llm.beam_search("x:", params)]
    assert (only.output_text, only.finish_reason, only.stop_reason) == ("once upon", "stop", " a")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"temperature": 1.0}, "temperature"),
        ({"n": 5}, "n"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),  # equal to True, and would have meant False
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **changes})  # type: ignore[arg-type]


def test_a_search_takes_no_other_params(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match="params: must be BeamSearchParams"):
        make_llm(script).beam_search("x:", LONG)  # type: ignore[arg-type]


def test_each_prompt_may_have_a_search_of_its_own(make_llm: MakeLLM) -> None:
    wide, narrow = BeamSearchParams(3, 40), BeamSearchParams(2, 4)
    first, second = make_llm(script).beam_search(["x:", "y:"], [wide, narrow])
    assert (len(first.sequences), len(second.sequences)) == (3, 2)
    assert len(second.sequences[0].output_token_ids) == 4


def test_as_many_searches_as_prompts_are_needed(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match="^params: .*2.*1"):
        make_llm(script).beam_search("x:", [BeamSearchParams(2, 4), BeamSearchParams(2, 4)])


def test_best_of_returns_the_likeliest_first_and_streams_at_the_end(make_llm: MakeLLM) -> None:
    llm = make_llm(lambda prompt, index: f"number {index}")
    llm.executor.logprob = lambda index: -0.5 * (4 - index)  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=20, best_of=4, n=2)
    (output,) = llm.generate("x", params)
    assert [one.text for one in output.outputs] == ["number 3", "number 2"]
    assert output.outputs[0].score == pytest.approx(-0.5)
    pieces = list(llm.stream("x", params))
    assert [(piece.index, piece.text, piece.finish_reason) for piece in pieces] == [
        (0, "number 3", "stop"),
        (1, "number 2", "stop"),
    ]


# ------------------------------------------------------------------------------------------------- live and branched
def grown(live: LiveRequest, count: int, llm: object) -> None:
    while len(live.token_ids()) < count:
        llm.step()  # type: ignore[attr-defined]


def test_a_live_request_is_computed_step_by_step(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    live = llm.start("x:", LONG)
    assert (live.token_ids(), live.is_finished) == ((), False)
    grown(live, 4, llm)
    assert live.text() == "once"
    output = live.wait()
    assert (output.outputs[0].text, live.text(), live.output) == (STORY, STORY, output)
    assert llm.step() == []


def test_a_fork_goes_on_from_the_middle_of_a_running_request(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    live = llm.start("x:", LONG)
    grown(live, 8, llm)
    fork = llm.fork(live, 4, sampling_params=SamplingParams(max_tokens=5, temperature=0.7))
    now = llm.fork(live)
    assert fork.prompt_token_ids == (*ids("x:"), *ids("once"))
    assert fork.wait().outputs[0].text == " upon"
    assert now.wait().outputs[0].text == STORY[8 : 8 + 16]
    assert live.wait().outputs[0].text == STORY


def test_a_fork_computes_nothing_again(make_llm: MakeLLM) -> None:
    llm = make_llm(script, block_size=4)
    live = llm.start("a long prompt it is:", LONG)
    grown(live, 8, llm)
    before = llm.stats().computed_tokens
    fork = llm.fork(live, 8, sampling_params=SamplingParams(max_tokens=1))
    fork.wait()
    live.cancel()
    live.wait()
    assert llm.stats().computed_tokens - before < 8


def test_finished_outputs_are_forked_too(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    (output,) = llm.generate("x:", LONG)
    assert llm.fork(output, 5, sampling_params=LONG).wait().outputs[0].text == STORY[5:]


@pytest.mark.parametrize("index", [7, -1, "1", True])
def test_a_sample_that_is_not_there_is_refused(make_llm: MakeLLM, index: Any) -> None:
    live = make_llm(script).start("x:", SamplingParams(max_tokens=20, n=2))
    for _ in range(2):  # while it runs, and when it is over
        for call in (live.cancel, live.text, live.token_ids):
            with pytest.raises(InvalidRequest, match=r"index: must be (in \[0, 1\]|a whole number)"):
                call(index)
        assert {one.finish_reason for one in live.wait().outputs} == {"stop"}


@pytest.mark.parametrize(("named", "value"), [("index", "1"), ("index", 0.5), ("at_token", "2"), ("at_token", 1.0)])
def test_a_place_to_fork_at_must_be_a_whole_number(make_llm: MakeLLM, named: str, value: Any) -> None:
    llm = make_llm(script)
    (output,) = llm.generate("x:", LONG)
    with pytest.raises(InvalidRequest, match=f"{named}: must be a whole number"):
        llm.fork(output, **{named: value})


@pytest.mark.parametrize("source", [5, None, "x:", []])
def test_only_requests_and_their_outputs_are_forked(make_llm: MakeLLM, source: Any) -> None:
    with pytest.raises(InvalidRequest, match="source: must be a request or its output"):
        make_llm(script).fork(source)


def test_branches_can_be_ended_early(make_llm: MakeLLM) -> None:
    llm = make_llm(lambda prompt, index: "z" * 200)
    live = llm.start("x", SamplingParams(max_tokens=200, n=2))
    grown(live, 3, llm)
    live.cancel(1)
    fork = llm.fork(live, 2, sampling_params=SamplingParams(max_tokens=200))
    llm.step()
    fork.cancel()
    assert fork.wait().outputs[0].finish_reason == "abort"
    live.cancel()
    assert {one.finish_reason for one in live.wait().outputs} == {"abort"}
    live.cancel()
    assert llm.stats().blocks.used == 0
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].text == "zz"


def test_one_prompt_is_started_at_a_time(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match="^prompt: are 2 prompts; pass one"):
        make_llm(script).start(["x:", "y:"], LONG)  # type: ignore[arg-type]


def test_other_calls_wait_until_no_request_lives(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    live = llm.start("x:", LONG)
    with pytest.raises(QuireError, match="in the middle of another call"):
        llm.generate("x:", LONG)
    live.wait()
    stream = llm.stream("x:", LONG)
    next(stream)
    with pytest.raises(QuireError, match="in the middle of another call"):
        llm.start("x:", LONG)
    stream.close()


def test_a_place_that_is_not_there_is_refused_by_name(make_llm: MakeLLM) -> None:
    llm = make_llm(script)
    (output,) = llm.generate("x:", SamplingParams(max_tokens=3))
    with pytest.raises(InvalidRequest, match=r"at_token: must be in \[0, 3\], got 4"):
        llm.fork(output, 4)
    with pytest.raises(InvalidRequest, match="index: must be in"):
        llm.fork(output, index=1)
