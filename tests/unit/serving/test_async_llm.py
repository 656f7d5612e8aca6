"""AsyncLLM: requests of an event loop run in one batch, stream, end early and fail by themselves."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from quire.serving import async_engine
from quire.serving.async_llm import AsyncLLM, EngineArgs
from quire.types.errors import ConfigError, EngineDead, InvalidRequest, QuireError
from quire.types.output import RequestOutput
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import SamplingDefaults
from quire.types.vllm_sampling import RequestOutputKind
from tests.unit.serving.conftest import MakeLLM
from tests.unit.serving.scripted import ids

LONG = SamplingParams(max_tokens=100)
FINAL = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.FINAL_ONLY)
DELTA = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)

MakeAsync = Callable[..., AsyncLLM]


def echo(prompt: str, index: int) -> str:
    return f"<{prompt}>"


def endless(prompt: str, index: int) -> str:
    return "x" * 5_000


@pytest.fixture
def make_async(make_llm: MakeLLM) -> Any:
    """make_async(script, ...) -> AsyncLLM over the same scripted model as make_llm's."""
    made: list[AsyncLLM] = []

    def make(script: Callable[[str, int], str], **options: Any) -> AsyncLLM:
        offline = make_llm(script, **options)  # puts the scripted model in the place of a real one
        offline.close()
        executor = offline.executor  # type: ignore[attr-defined]
        options = {name: value for name, value in options.items() if name not in ("fails", "defaults")}
        llm = AsyncLLM(**{"device": "cpu", **options})
        llm.executor = executor  # type: ignore[attr-defined]
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.shutdown()


def slow_down(llm: AsyncLLM) -> None:
    """Let a request of many tokens live long enough to be ended early."""
    llm.executor.on_launch = lambda: time.sleep(0.02)  # type: ignore[attr-defined]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def outputs_of(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_python_collects_no_garbage_by_itself_while_a_request_is_live(make_async: MakeAsync) -> None:
    seen = []

    def watch(prompt: str, index: int) -> str:
        seen.append(gc.isenabled())
        return prompt

    llm, was_enabled = make_async(watch), gc.isenabled()
    gc.enable()
    try:
        run(outputs_of(llm.generate("one", LONG)))
        until = time.monotonic() + 30
        while not gc.isenabled() and time.monotonic() < until:
            time.sleep(0.01)
        assert gc.isenabled()  # while the engine waits for a request
        run(outputs_of(llm.generate("two", LONG)))
        llm.shutdown()
        assert gc.isenabled()
    finally:
        if not was_enabled:
            gc.disable()
    assert seen
    assert not any(seen)


def test_every_output_holds_the_answer_so_far(make_async: MakeAsync) -> None:
    llm = make_async(echo)
    outputs = run(outputs_of(llm.generate("wörld", LONG, "mine")))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "<wörld>"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert all(output.prompt_token_ids == ids("wörld") for output in outputs)


def test_deltas_add_up_to_the_answer_with_its_tokens_and_logprobs(make_async: MakeAsync, make_llm: MakeLLM) -> None:
    wanted = make_llm(echo).generate("añb", SamplingParams(max_tokens=100, logprobs=2, n=2))[0]
    llm = make_async(echo)
    sampling = SamplingParams(max_tokens=100, logprobs=2, n=2, output_kind=RequestOutputKind.DELTA)
    outputs = run(outputs_of(llm.generate("añb", sampling)))
    for index in (0, 1):
        parts = [one for output in outputs for one in output.outputs if one.index == index]
        whole = wanted.outputs[index]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == whole.logprobs
        assert parts[-1].finish_reason == whole.finish_reason
    assert outputs[-1].finished


def test_only_the_end_comes_where_only_the_end_is_wanted(make_async: MakeAsync) -> None:
    (output,) = run(outputs_of(make_async(echo).generate("a", FINAL)))
    assert output.outputs[0].text == "<a>"
    assert output.finished


def test_many_requests_run_in_one_batch_and_keep_to_themselves(
    make_async: MakeAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, submitted, goes_on = make_async(echo), list[Any](), threading.Event()
    submit = async_engine.EngineThread.submit
    monkeypatch.setattr(
        async_engine.EngineThread, "submit", lambda self, stream: (submitted.append(stream), submit(self, stream))[1]
    )
    llm.executor.on_launch = lambda: goes_on.wait(60)  # type: ignore[attr-defined]

    async def all_of_them() -> list[list[RequestOutput]]:
        kinds = [LONG, DELTA, FINAL]
        streams = [llm.generate(f"prompt {i}", kinds[i % 3]) for i in range(30)]
        answers = asyncio.gather(*map(outputs_of, streams))
        while len(submitted) < 30:
            await asyncio.sleep(0.001)
        goes_on.set()
        return await answers

    for i, outputs in enumerate(run(all_of_them())):
        last = outputs[-1].outputs[0].text
        text = "".join(output.outputs[0].text for output in outputs if output.outputs) if i % 3 == 1 else last
        assert text == f"<prompt {i}>"
    assert llm.executor.num_launched < 30 * 10  # type: ignore[attr-defined]  # not one after the other


@pytest.mark.parametrize("wrong", [7, ["a", 7], [None]])
def test_what_is_no_id_cannot_be_aborted(make_async: MakeAsync, wrong: Any) -> None:
    async def work() -> None:
        async with make_async(echo) as llm:
            with pytest.raises(InvalidRequest, match="request_id: is (7|None), not a text"):
                await llm.abort(wrong)

    asyncio.run(work())


def test_an_aborted_request_ends_with_what_it_has(make_async: MakeAsync) -> None:
    llm = make_async(endless, max_model_len=256)
    slow_down(llm)

    async def work() -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate("p", SamplingParams(max_tokens=200), "long"):
            outputs.append(output)
            if len(outputs) == 1:
                await llm.abort(["long", "no such request"])
        return outputs

    last = run(work())[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].text.startswith("x")


def test_leaving_an_iteration_frees_the_engine(make_async: MakeAsync) -> None:
    llm = make_async(endless, max_model_len=256)

    async def work() -> None:
        stream = llm.generate("p", SamplingParams(max_tokens=200))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(outputs_of(llm.generate("q", SamplingParams(max_tokens=200))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (stats := await llm.stats()).running or stats.waiting:
            await asyncio.sleep(0.001)
        assert stats.blocks.used == 0

    run(work())


def test_a_call_that_is_cancelled_before_its_turn_harms_no_other(make_async: MakeAsync) -> None:
    llm = make_async(echo)
    in_step, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        in_step.set()
        assert goes_on.wait(60)

    llm.executor.on_launch = hold  # type: ignore[attr-defined]

    async def work() -> str:
        answer = asyncio.create_task(outputs_of(llm.generate("a", FINAL)))
        await asyncio.to_thread(in_step.wait, 60)
        waiting = asyncio.create_task(llm.stats())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        goes_on.set()
        return (await answer)[-1].outputs[0].text

    assert run(work()) == "<a>"
    assert llm.is_running


def test_a_refused_request_raises_and_harms_no_other(make_async: MakeAsync) -> None:
    llm = make_async(echo, fails=frozenset({"bad"}))

    async def work() -> None:
        good = asyncio.create_task(outputs_of(llm.generate("good", FINAL, "one")))
        for prompt, error in (("x" * 300, InvalidRequest), (["a", "b"], InvalidRequest), ("bad", QuireError)):
            with pytest.raises(error):
                await outputs_of(llm.generate(prompt, LONG))
        with pytest.raises(InvalidRequest, match="^request_id"):
            await outputs_of(llm.generate("a", LONG, ""))
        with pytest.raises(InvalidRequest, match="^lora_request"):
            await outputs_of(llm.generate("a", LONG, lora_request="x"))
        assert (await good)[0].outputs[0].text == "<good>"

    run(work())


def test_a_request_id_that_is_live_is_refused_and_can_be_used_again(make_async: MakeAsync) -> None:
    llm = make_async(endless, max_model_len=256)
    gate = threading.Event()
    llm.executor.on_launch = lambda: gate.wait(30)  # type: ignore[attr-defined]

    async def work() -> None:
        first = asyncio.create_task(outputs_of(llm.generate("p", FINAL, "same")))
        while not llm.executor.num_launched:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        second = asyncio.create_task(outputs_of(llm.generate("q", FINAL, "same")))
        while not llm._engine._calls:
            await asyncio.sleep(0.001)
        gate.set()
        with pytest.raises(InvalidRequest, match="^request_id: 'same' is in use"):
            await second
        assert (await first)[0].finished
        assert (await outputs_of(llm.generate("p", FINAL, "same")))[0].finished

    run(work())


def test_the_models_defaults_hold_where_no_sampling_is_given(make_async: MakeAsync) -> None:
    llm = make_async(endless, defaults=SamplingDefaults(max_tokens=3))

    async def work() -> None:
        assert (await outputs_of(llm.generate("p")))[-1].outputs[0].text == "xxx"
        assert (await llm.get_default_sampling_params()).max_tokens == 3
        assert (await llm.get_tokenizer()).encode("a") == ids("a")
        assert await llm.reset_prefix_cache() >= 0
        await llm.check_health()

    run(work())


def test_an_engine_that_fails_ends_all_requests_and_takes_no_more(make_async: MakeAsync) -> None:
    llm = make_async(endless, max_model_len=256)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    llm.executor.on_launch = fail  # type: ignore[attr-defined]

    async def work() -> None:
        found = await asyncio.gather(*(outputs_of(llm.generate("p", LONG)) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, QuireError) for error in found)
        assert not llm.is_running
        with pytest.raises(EngineDead):
            await llm.check_health()
        with pytest.raises(EngineDead):
            await outputs_of(llm.generate("p", LONG))
        with pytest.raises(EngineDead):
            await llm.stats()

    run(work())


def test_shutting_down_ends_what_is_live(make_async: MakeAsync) -> None:
    llm = make_async(endless, max_model_len=256)
    slow_down(llm)

    async def work() -> None:
        async with llm:
            stream = llm.generate("p", LONG)
            await anext(stream)
        with pytest.raises(EngineDead, match="shut down"):
            async for _ in stream:
                pass
        llm.shutdown()

    run(work())


def test_nothing_is_kept_of_requests_that_are_over(make_async: MakeAsync) -> None:
    llm = make_async(echo)

    async def work() -> None:
        for _ in range(20):
            await outputs_of(llm.generate("a", FINAL))

    run(work())
    batch = llm._engine._batch
    assert not llm._engine._streams
    assert not batch.is_live
    assert batch.outputs == batch.errors == []
    assert batch.num_finished == 0


def test_engine_args_are_checked_by_name_and_load_the_model(make_async: MakeAsync) -> None:
    make_async(echo)
    llm = AsyncLLM.from_engine_args(EngineArgs("m", device="cpu", tensor_parallel_size=1, max_num_seqs=3))
    try:
        assert llm.config.scheduler.max_num_seqs == 3
        assert run(outputs_of(llm.generate("a", FINAL)))[0].outputs[0].text == "<a>"
    finally:
        llm.shutdown()
    with pytest.raises(ConfigError, match=r"^max_num_seq: .*did you mean max_num_seqs\?"):
        EngineArgs("m", max_num_seq=3)
