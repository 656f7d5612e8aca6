"""An engine that sleeps, wakes up, is paused and gets new weights answers as a fresh one does."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from family_bench import randomize
from family_models import FamilyCase
from quire import LLM, AsyncLLM, SamplingParams
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import RequestOutput
from quire.types.standby import PauseMode
from tiny_models import DEVICE

PROMPTS = ([5, 9, 2, 11, 7, 3, 8, 1, 30, 12], [4, 4, 17])
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": DEVICE, "dtype": "float32", "enable_sleep_mode": True, "skip_tokenizer_init": True, "max_model_len": 128,
    "num_kv_blocks": 64, "max_num_seqs": 4,
}  # fmt: skip
QKV = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]


class Pair:
    """Two checkpoints of one model, and what transformers answers with each."""

    def __init__(self, folder: Path, name: str = "llama") -> None:
        self.old, self.new = FamilyCase(name, folder / "old"), FamilyCase(name, folder / "new")
        randomize(self.new.model, seed=7)
        self.new.model.save_pretrained(self.new.directory)
        self.before, self.after = ([_expected(case, each) for each in PROMPTS] for case in (self.old, self.new))
        assert all(one != other for one, other in zip(self.before, self.after, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.new.model.state_dict())


def _expected(case: FamilyCase, prompt: list[int]) -> list[int]:
    return case.expected(prompt)[:NUM_TOKENS]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    assert tmp_path_factory is not None
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def loaded(pair: Pair) -> Iterator[LLM]:
    with LLM(str(pair.old.directory), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """An engine that is awake, with the weights of its files."""
    yield loaded
    loaded.wake_up()
    loaded.reload_weights()


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached(llm: LLM) -> int:
    return llm.stats().blocks.cached


# ---------------------------------------------------------------------------------------------------- new weights
def test_all_tensors_of_a_trained_model_replace_the_weights(llm: LLM, pair: Pair) -> None:
    assert answers(llm) == pair.before
    llm.load_weights(pair.tensors().items(), version="step-100")
    assert cached(llm) == 0
    assert llm.weight_version == "step-100"
    assert answers(llm) == pair.after


def test_another_checkpoint_on_disk_replaces_the_weights_and_the_own_one_comes_back(llm: LLM, pair: Pair) -> None:
    llm.update_weights_from_disk(pair.new.directory)
    assert answers(llm) == pair.after
    assert llm.weight_version != "default"
    llm.reload_weights()
    assert answers(llm) == pair.before
    assert llm.weight_version == "default"


def test_a_model_that_is_served_without_its_indexer_takes_new_weights(tmp_path: Path) -> None:
    case = FamilyCase("deepseek_v32", tmp_path, {"index_topk": SETTINGS["max_model_len"]})
    expected = [_expected(case, each) for each in PROMPTS]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        assert answers(llm) == expected


def test_some_layers_can_be_replaced_without_the_others(llm: LLM, pair: Pair) -> None:
    tensors = pair.tensors()
    for name in list(tensors):  # in three calls, layer by layer
        if "layers.0." not in name and "layers.1." not in name:
            llm.load_weights([(name, tensors.pop(name))]) if ".layers." not in name else None
    llm.load_weights([(name, tensors.pop(name)) for name in list(tensors) if "layers.0." in name])
    assert answers(llm) != pair.after
    llm.load_weights(tensors.items())
    assert answers(llm) == pair.after


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(96, 64)}, "no place"),
        ({"model.norm.weight": torch.zeros(3)}, "has shape"),
        ({"model.norm.weight": torch.full((64,), float("nan"))}, "not finite"),
        ({QKV[0]: torch.ones(64, 64)}, "only be replaced together"),
        ({}, "are none"),
        ({"model.norm.weight": "text"}, "no tensor"),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(llm: LLM, pair: Pair, bad: dict[str, Any], reason: str) -> None:
    good = {} if not bad else {"model.embed_tokens.weight": pair.tensors()["model.embed_tokens.weight"]}
    with pytest.raises(InvalidRequest, match=reason):
        llm.load_weights((good | bad).items())
    assert answers(llm) == pair.before


def test_a_checkpoint_of_another_size_is_refused_and_changes_nothing(llm: LLM, pair: Pair, tmp_path: Path) -> None:
    other = FamilyCase("llama", tmp_path / "wide", {"intermediate_size": 128})
    assert other.model is not None
    with pytest.raises(InvalidRequest, match="model_path.*intermediate_size"):
        llm.update_weights_from_disk(other.directory)
    with pytest.raises(InvalidRequest, match="model_path"):
        llm.update_weights_from_disk(tmp_path / "nothing")
    assert answers(llm) == pair.before


def test_an_update_that_fails_half_way_is_named_and_no_request_runs_until_another_succeeds(
    llm: LLM, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = llm._client._core.executor  # type: ignore[attr-defined]
    weights = executor.standby._main.weights
    whole = type(weights).replace

    def fail(*given: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(type(weights), "replace", fail)
    with pytest.raises(QuireError, match="half way.*no memory"):
        llm.load_weights(pair.tensors().items())
    monkeypatch.setattr(type(weights), "replace", whole)
    with pytest.raises(InvalidRequest, match="has no weights"):
        answers(llm)
    with pytest.raises(InvalidRequest, match="not all"):
        llm.load_weights([(name, pair.tensors()[name]) for name in QKV])
    llm.load_weights(pair.tensors().items())
    assert answers(llm) == pair.after


def test_own_files_that_were_written_anew_are_not_answered_from_blocks_of_the_old_ones(
    pair: Pair, tmp_path: Path
) -> None:
    folder, long = tmp_path / "model", [*PROMPTS[0], *range(3, 40)]
    shutil.copytree(pair.old.directory, folder)
    with LLM(str(folder), **SETTINGS | {"num_kv_blocks": 8, "host_cache_memory": "16MiB"}) as llm:
        first = _answer(llm, long)
        for token in (1, 2):  # the blocks of the first prompt go to host memory
            _answer(llm, [token] * 100)
        shutil.copy(pair.new.directory / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").replace(folder / "model.safetensors")
        llm.reload_weights()
        again = _answer(llm, long)
    with LLM(str(folder), **SETTINGS) as fresh:
        assert again == _answer(fresh, long) != first


def _answer(llm: LLM, prompt: list[int]) -> list[int]:
    return list(llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"speculative_config": {"method": "self_draft", "num_layers": 1, "num_speculative_tokens": 2}},
        {"attention_backend": "gather"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_new_weights_answer_as_a_fresh_engine_does(pair: Pair, settings: dict[str, Any]) -> None:
    with LLM(str(pair.new.directory), **SETTINGS | settings) as fresh:
        wanted = answers(fresh)
    with LLM(str(pair.old.directory), **SETTINGS | settings) as llm:
        assert answers(llm) != wanted
        llm.update_weights_from_disk(pair.new.directory)
        assert answers(llm) == wanted
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        llm.sleep()
        llm.wake_up()
        with pytest.raises(InvalidRequest, match="no place"):
            llm.load_weights([("unknown", torch.zeros(1))])
        llm.load_weights(pair.tensors().items())
        assert answers(llm) == wanted


# ------------------------------------------------------------------------------------------------ sleep and wake up
def test_a_model_that_slept_answers_as_before_with_an_empty_cache(llm: LLM, pair: Pair) -> None:
    assert answers(llm) == pair.before
    llm.sleep()
    assert llm.is_sleeping
    assert cached(llm) == 0
    with pytest.raises(InvalidRequest, match="asleep"):
        answers(llm)
    llm.sleep()  # again: nothing changes
    llm.wake_up()
    llm.wake_up()
    assert not llm.is_sleeping
    assert answers(llm) == pair.before


def test_a_deep_sleep_drops_the_weights_until_they_are_loaded_again(llm: LLM, pair: Pair) -> None:
    llm.sleep(level=1)
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(InvalidRequest, match="has no weights"):
        answers(llm)
    llm.reload_weights()
    assert answers(llm) == pair.before


def test_a_trainer_wakes_the_weights_up_updates_them_and_then_wakes_the_cache_up(llm: LLM, pair: Pair) -> None:
    llm.sleep(level=2)
    with pytest.raises(InvalidRequest, match="asleep"):
        llm.load_weights(pair.tensors().items())
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping
    llm.load_weights(pair.tensors().items())
    with pytest.raises(InvalidRequest, match="kv_cache"):
        answers(llm)
    llm.wake_up(tags=["kv_cache"])
    assert answers(llm) == pair.after


@pytest.mark.parametrize(("level", "tags"), [(3, None), (0, None), (1, ["wights"]), (1, "weights"), (1, [])])
def test_an_unknown_level_or_tag_is_refused_by_name(llm: LLM, level: int, tags: Any) -> None:
    with pytest.raises(InvalidRequest, match="level" if tags is None else "tags"):
        llm.sleep(level) if tags is None else llm.wake_up(tags)
    assert not llm.is_sleeping


def test_many_cycles_leak_no_memory_and_no_block(llm: LLM, pair: Pair) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    answers(llm)
    llm.load_weights(pair.tensors().items())
    before = tensors()
    for cycle in range(50):
        llm.sleep(level=1 + cycle % 2)
        llm.wake_up()
        if cycle % 2:
            llm.load_weights(pair.tensors().items())
    assert tensors() <= before + 2
    assert answers(llm) == pair.after
    llm._client._core.check()  # type: ignore[attr-defined]


@pytest.mark.skipif(DEVICE != "cpu", reason="measures pages of the host")
def test_a_sleeping_engine_on_a_cpu_gives_pages_of_its_cache_back(pair: Pair) -> None:
    with LLM(str(pair.old.directory), **SETTINGS | {"num_kv_blocks": 4096, "max_model_len": 512}) as llm:
        memory = llm._client._core.executor._worker.cache.blocks  # type: ignore[attr-defined]
        memory.fill_(1.0)
        resident = _resident_bytes()
        llm.sleep()
        assert resident - _resident_bytes() > 0.9 * memory.nbytes > 2**24
        llm.wake_up()
        assert not memory.any()
        assert answers(llm) == pair.before


def _resident_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Rss"].split()[0]) * 1024


# ----------------------------------------------------------------------------------------------------- under load
async def _ask(llm: AsyncLLM, prompt: list[int], sampling: SamplingParams = LONG) -> RequestOutput:
    last: RequestOutput | None = None
    async for output in llm.generate({"prompt_token_ids": prompt}, sampling):
        last = output
    assert last is not None
    return last


def _tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


async def _begun(llm: AsyncLLM) -> asyncio.Task[RequestOutput]:
    """A request that has tokens, and will have more."""
    task = asyncio.create_task(_ask(llm, PROMPTS[0]))
    before = (await llm.stats()).output_tokens
    while (await llm.stats()).output_tokens < before + 3:
        await asyncio.sleep(0)
    assert not task.done()
    return task


def _run_async(pair: Pair, scenario: Any) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(pair.old.directory), **SETTINGS)
        try:
            await scenario(llm)
        finally:
            llm.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_sleep_under_load_ends_waits_for_or_keeps_the_running_requests(pair: Pair, mode: PauseMode) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        whole = _tokens(await _ask(llm, PROMPTS[0]))
        task = await _begun(llm)
        await llm.sleep(mode=mode)
        assert await llm.is_sleeping()
        if mode == "keep":
            assert not task.done()
        else:
            assert (await task).outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
        with pytest.raises(InvalidRequest, match="asleep"):
            await _ask(llm, PROMPTS[1])
        await llm.wake_up()
        found = _tokens(await task)
        assert found == whole[: len(found)]
        assert len(found) == len(whole) or mode == "abort"
        assert _tokens(await _ask(llm, PROMPTS[0])) == whole

    _run_async(pair, scenario)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_of_a_paused_engine_wait_until_it_is_resumed(pair: Pair, mode: PauseMode) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = await _begun(llm)
        await llm.pause_generation(mode=mode)
        assert await llm.is_paused()
        later = asyncio.create_task(_ask(llm, PROMPTS[1], GREEDY))
        gone = asyncio.create_task(_ask(llm, PROMPTS[1], LONG))
        await asyncio.sleep(0.05)
        gone.cancel()
        assert not later.done()
        assert task.done() == (mode != "keep")
        await llm.resume_generation()
        assert _tokens(await later) == pair.before[1]
        assert len(_tokens(await task)) == LONG.max_tokens or mode == "abort"

    _run_async(pair, scenario)


def test_kept_requests_continue_with_new_weights_as_a_fresh_engine_would(pair: Pair) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = await _begun(llm)
        await llm.pause_generation(mode="keep")
        await llm.load_weights(pair.tensors().items(), mode="keep")
        assert await llm.weight_version() == "1"
        assert not task.done()
        await llm.resume_generation()
        found = _tokens(await task)
        before = next(count for count in range(80) if found[:count] != whole[:count]) - 1
        assert 0 < before < len(whole)
        again = await _ask(llm, [*PROMPTS[0], *found[:before]], GREEDY)
        assert found[before : before + NUM_TOKENS] == _tokens(again)

    whole: list[int] = []
    _run_async(pair, lambda llm: _fill(llm, whole))
    _run_async(pair, scenario)


async def _fill(llm: AsyncLLM, whole: list[int]) -> None:
    whole += _tokens(await _ask(llm, PROMPTS[0]))


def test_a_command_that_waits_keeps_requests_that_cannot_run(pair: Pair) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = await _begun(llm)
        async with asyncio.timeout(600):
            await llm.pause_generation(mode="keep")
            await llm.load_weights(pair.tensors().items(), mode="wait")
            await llm.sleep(mode="wait")
            await llm.wake_up(["weights"])
            await llm.reload_weights(mode="wait")
            await llm.wake_up()
            assert not task.done()
            await llm.pause_generation(mode="wait")  # lets them finish
            assert len(_tokens(await task)) == LONG.max_tokens
            await llm.resume_generation()
            assert _tokens(await _ask(llm, PROMPTS[1], GREEDY)) == pair.before[1]

    _run_async(pair, scenario)


def test_kept_requests_are_not_lost_in_tiers_by_a_command_that_waits(pair: Pair) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(str(pair.old.directory), **SETTINGS, host_cache_memory="16MiB")
        try:
            task = await _begun(llm)
            async with asyncio.timeout(600):
                await llm.pause_generation(mode="keep")
                with pytest.raises(InvalidRequest, match="mode.*tiers"):
                    await llm.sleep(mode="wait")
                await llm.resume_generation()
                assert len(_tokens(await task)) == LONG.max_tokens
        finally:
            llm.shutdown()

    asyncio.run(scenario())


def test_the_state_is_told_while_a_command_waits(pair: Pair) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = await _begun(llm)
        pause = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        assert not await llm.is_paused()
        assert not task.done()
        await pause
        assert await llm.is_paused()

    _run_async(pair, scenario)


def test_an_error_of_the_caller_s_tensors_refuses_the_update_and_nothing_else(pair: Pair) -> None:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from list(pair.tensors().items())[:1]
        raise RuntimeError("the trainer failed")

    async def scenario(llm: AsyncLLM) -> None:
        task = await _begun(llm)
        with pytest.raises(InvalidRequest, match="the trainer failed"):
            await llm.load_weights(tensors())
        assert (await task).outputs[0].finish_reason == "length"
        assert _tokens(await _ask(llm, PROMPTS[0], GREEDY)) == pair.before[0]

    _run_async(pair, scenario)


def test_an_update_that_is_refused_ends_no_request(pair: Pair) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = await _begun(llm)
        with pytest.raises(InvalidRequest, match="no place"):
            await llm.load_weights([("unknown", torch.zeros(1))], mode="abort")
        assert (await task).outputs[0].finish_reason == "length"

    _run_async(pair, scenario)
