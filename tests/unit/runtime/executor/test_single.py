"""The executor in this process, over random weights and the real sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_files import SMALL, make_adapter
from quire.config.model import Heads
from quire.engine.core import EngineCore
from quire.kernels.native.loader import set_threads
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.types.adapters import NO_ADAPTER, AdapterPlacement
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, Masks, NewRow, StepPlan
from tiny_models import DEVICE, VOCAB, engine_config, tiny_config, transformers_model

FILES = ModelFiles("tiny", Path("nowhere"), "hf")


def executor() -> SingleExecutor:
    return SingleExecutor(
        FILES, tiny_config(), engine_config(block_size=16, rows=4), load_format="dummy", progress=None
    )


def row(number: int, length: int, **sampling: object) -> NewRow:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return NewRow(number, tokens, length, (number,), params, TokenRules(), sample_index=0, seed=7)


def test_results_come_back_in_the_order_of_launching() -> None:
    single = executor()
    assert single.depth == (1 if DEVICE == "cpu" else 2)
    single.launch(StepPlan(step=4, new_rows=(row(0, 5),), chunks=(Chunk(0, 0, 5, (0,)),)))
    single.launch(StepPlan(step=5, decode_rows=np.array([0], dtype=np.int32)))
    first, second = single.collect(), single.collect()
    assert (first.step, second.step) == (4, 5)
    assert first.token_ids.dtype == np.int32
    assert first.failures == second.failures == ()
    single.check()


def test_adapters_are_loaded_and_unloaded(tmp_path: Path) -> None:
    config = tiny_config()
    settings = replace(engine_config(block_size=16, rows=4), adapters=SMALL)
    single = SingleExecutor(FILES, config, settings, load_format="dummy")
    folder = make_adapter(tmp_path, transformers_model(config))
    info = single.read_adapter("mine", str(folder))
    assert (info.name, info.rank) == ("mine", 4)
    steps = {}
    for slot in (NO_ADAPTER, 1):
        new = row(0, 5, logprobs=0)._replace(adapter=slot)
        placed = (AdapterPlacement(1, info.digest),) if slot == 1 else ()
        single.launch(StepPlan(0, new_rows=(new,), chunks=(Chunk(0, 0, 5, (0,)),), adapters=placed, released=(0,)))
        result = single.collect()
        assert not result.failures
        (logprobs,) = result.logprobs
        steps[slot] = float(logprobs.entry.logprobs[0])
    assert steps[NO_ADAPTER] != steps[1]
    single.forget_adapter(info.digest)
    single.check()
    single.close()


def test_an_executor_without_slots_reads_no_adapters(tmp_path: Path) -> None:
    single = executor()
    with pytest.raises(InvalidRequest, match="no slots for LoRA adapters"):
        single.read_adapter("mine", str(tmp_path))
    single.close()
    with pytest.raises(EngineDead):
        single.read_adapter("mine", str(tmp_path))


def test_the_same_seed_gives_the_same_model() -> None:
    answers = []
    for _ in range(2):
        single = executor()
        single.launch(StepPlan(step=0, new_rows=(row(0, 3),), chunks=(Chunk(0, 0, 3, (0,)),)))
        answers.append(single.collect().token_ids.tolist())
    assert answers[0] == answers[1]
    assert 0 <= answers[0][0] < VOCAB


def test_a_row_the_sampler_refuses_fails_alone() -> None:
    single = executor()
    bad = row(1, 4, allowed_token_ids=[VOCAB + 5])
    chunks = (Chunk(0, 0, 3, (0,)), Chunk(1, 0, 4, (1,)))
    single.launch(StepPlan(step=0, new_rows=(row(0, 3), bad), chunks=chunks))
    result = single.collect()
    assert [failure.row for failure in result.failures] == [1]
    assert len(result.token_ids) == 2


def test_logprobs_and_prompt_logprobs_reach_the_result() -> None:
    single = executor()
    asked = row(2, 6, logprobs=3, prompt_logprobs=2)
    single.launch(StepPlan(step=0, new_rows=(asked,), chunks=(Chunk(2, 0, 6, (2,)),)))
    result = single.collect()
    assert [entry.row for entry in result.logprobs] == [2]
    assert result.logprobs[0].entry.token_ids[0] == result.token_ids[0]
    (part,) = result.prompt_logprobs
    assert (part.row, part.table.start, part.table.width) == (2, 1, 3)
    assert part.table.token_ids.reshape(5, 3)[:, 0].tolist() == [2, 3, 4, 5, 6]


def test_a_closed_executor_refuses_work_and_may_be_closed_again() -> None:
    single = executor()
    single.close()
    single.close()
    with pytest.raises(EngineDead):
        single.launch(StepPlan(step=0))


def only(*tokens: int) -> Masks:
    """A mask for each of the first samples: one token alone is allowed."""
    bits = np.zeros((len(tokens), -(-VOCAB // 32)), dtype=np.uint32)
    for line, token in enumerate(tokens):
        bits[line, token // 32] = 1 << (token % 32)
    return Masks(np.arange(len(tokens), dtype=np.int32), bits)


def test_a_guided_step_is_sampled_when_its_masks_come_while_the_step_before_can_be_collected() -> None:
    single, decode = executor(), np.array([0], dtype=np.int32)
    single.launch(StepPlan(step=0, new_rows=(row(0, 5),), chunks=(Chunk(0, 0, 5, (0,)),)))
    single.launch(StepPlan(step=1, decode_rows=decode, guided=True))
    assert single.collect().step == 0
    with pytest.raises(RuntimeError, match="the step to collect waits for its masks"):
        single.collect()
    with pytest.raises(RuntimeError, match="step 2 was launched while step 1 waits for its masks"):
        single.launch(StepPlan(step=2, decode_rows=decode))
    single.supply_masks(only(40))
    result = single.collect()
    assert (result.step, result.token_ids.tolist()) == (1, [40])
    with pytest.raises(RuntimeError, match="no guided plan waits"):
        single.supply_masks(None)
    single.launch(StepPlan(step=2, decode_rows=decode, guided=True))
    single.supply_masks(None)
    assert single.collect().failures == ()
    single.check()


def test_a_closed_executor_takes_no_masks() -> None:
    single = executor()
    single.launch(StepPlan(step=0, new_rows=(row(0, 5),), chunks=(Chunk(0, 0, 5, (0,)),), guided=True))
    single.close()
    with pytest.raises(EngineDead):
        single.supply_masks(None)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_guided_steps_only_enqueue_and_give_the_tokens_of_masks_in_the_plan() -> None:
    rng, both = np.random.default_rng(0), np.array([0, 1], dtype=np.int32)
    words = -(-VOCAB // 32)
    bits = [rng.integers(0, 2**32, (2, words), dtype=np.uint32) for _ in range(6)]
    bits[3][1] = bits[2][1]
    answers = []
    for guided in (False, True):
        config = engine_config(block_size=16, rows=4, device="cuda")
        single = SingleExecutor(FILES, tiny_config(), config, load_format="dummy")
        rows = (row(0, 5, logprobs=2), row(1, 5, temperature=1.0))
        single.launch(StepPlan(step=0, new_rows=rows, chunks=(Chunk(0, 0, 5, (0,)), Chunk(1, 0, 5, (1,)))))
        found = [single.collect().token_ids.tolist()]
        for step, allowed in enumerate(bits):
            changed = np.array([True, step != 3])
            masks = Masks(both, allowed.copy(), changed if guided else None)
            if not guided:
                single.launch(StepPlan(step=1 + step, decode_rows=both, masks=masks))
            else:
                torch.cuda.set_sync_debug_mode("default" if step == 0 else "error")  # the first step is captured
                try:
                    single.launch(StepPlan(step=1 + step, decode_rows=both, guided=True))
                    single.supply_masks(masks)
                    masks.bits[:] = 0
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            result = single.collect()
            assert result.logprobs[0].entry.token_ids[0] == result.token_ids[0]
            found.append(result.token_ids.tolist())
        single.check()
        answers.append(found)
    assert answers[0] == answers[1]


def test_the_executor_uses_the_configured_number_of_threads() -> None:
    before = torch.get_num_threads()
    config = engine_config(block_size=16, rows=4)
    try:
        wanted = type(config.device)("cpu", "float32", "float32", threads=1)
        SingleExecutor(FILES, tiny_config(), type(config)(config.cache, config.scheduler, wanted), load_format="dummy")
        assert torch.get_num_threads() == 1
    finally:
        set_threads(before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_two_steps_are_in_flight_and_tokens_feed_the_next_step_there() -> None:
    single = executor()
    config = engine_config(block_size=16, rows=4, device="cuda")
    deep = SingleExecutor(FILES, tiny_config(), config, load_format="dummy")
    assert deep.depth == 2
    decode = np.array([0], dtype=np.int32)
    for each in (single, deep):
        each.launch(StepPlan(step=0, new_rows=(row(0, 5),), chunks=(Chunk(0, 0, 5, (0,)),)))
    for step in (1, 2, 3):
        deep.launch(StepPlan(step=step, decode_rows=decode))
        assert deep.collect().step == step - 1
    assert deep.collect().step == 3
    deep.check()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_no_report_makes_a_launch_wait() -> None:
    config = engine_config(block_size=16, rows=4, device="cuda")
    single = SingleExecutor(FILES, tiny_config(), config, load_format="dummy")
    rows = (row(0, 5, logprobs=2), row(1, 5)._replace(num_candidates=4))
    single.launch(StepPlan(step=0, new_rows=rows, chunks=(Chunk(0, 0, 5, (0,)), Chunk(1, 0, 5, (1,)))))
    both, first = np.array([0, 1], dtype=np.int32), single.collect()
    single.launch(StepPlan(step=1, decode_rows=both))  # is captured
    single.collect()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (2, 3):
            single.launch(StepPlan(step=step, decode_rows=both))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result in (first, single.collect(), single.collect()):
        assert [told.row for told in result.logprobs] == [0]
        assert result.logprobs[0].entry.token_ids[0] == result.token_ids[0]
        assert result.candidates is not None
        assert result.candidates.samples.tolist() == [1]
        assert result.candidates.token_ids[0, 0] == result.token_ids[1]


def test_candidates_and_logprobs_reach_the_result() -> None:
    single = executor()
    rows = (row(0, 5, logprobs=1), row(1, 5)._replace(num_candidates=3), row(2, 5)._replace(num_candidates=4))
    single.launch(StepPlan(step=0, new_rows=rows, chunks=tuple(Chunk(each.row, 0, 5, (each.row,)) for each in rows)))
    result = single.collect()
    assert [told.row for told in result.logprobs] == [0]
    assert result.candidates is not None
    assert result.candidates.samples.tolist() == [1, 2]
    assert result.candidates.token_ids.shape == (2, 4)
    assert result.candidates.token_ids[:, 0].tolist() == result.token_ids[1:].tolist()
    assert (np.diff(result.candidates.scores, axis=1) <= 0).all()


def answers(attention: str, depth: int) -> dict[str, list[tuple[int, ...]]]:
    """What two kinds of request are answered through the whole engine, in a cache too small for both."""
    config = engine_config(block_size=4, rows=4, num_blocks=6, max_len=10)
    device = replace(config.device, attention_backend=attention)
    model = tiny_config(
        "qwen3", num_layers=1, hidden_size=32, intermediate_size=32, heads=Heads(2, 1, 16), tie_word_embeddings=True
    )
    single = SingleExecutor(FILES, model, replace(config, device=device), load_format="dummy", depth=depth)
    core = EngineCore(single, config.cache, replace(config.scheduler, max_num_batched_tokens=8), VOCAB)
    ways = {"two": {"n": 2, "temperature": 1.0}, "narrow": {"temperature": 0.9, "top_k": 5}}
    for first, (name, way) in enumerate(ways.items(), 1):
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, "seed": 5, **way})  # type: ignore[arg-type]
        core.submit(Submit(name, tuple(range(first, first + 5)), sampling, TokenRules()))
    found = {}
    while core.has_work:
        for message in core.step().finished:
            assert message.error is None
            found[message.request_id] = [tuple(sample.token_ids) for sample in message.samples]
        core.check()
        single.check()
    assert core.stats().preemptions > 0
    return found


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What was allocated and not yet written holds NaN, and the largest whole number."""
    if DEVICE != "cpu":  # elsewhere the switch refuses kernels too
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
def test_triton_gives_the_outputs_of_the_reference_with_preemption_forks_and_run_ahead() -> None:
    pytest.importorskip("triton")
    assert answers("triton", depth=2) == answers("reference", depth=1)


def test_depth_is_the_configured_one() -> None:
    config = engine_config(block_size=16, rows=4)
    assert SingleExecutor(FILES, tiny_config(), config, load_format="dummy", depth=3).depth == 3


def test_remaining_preparation_is_done_task_by_task_and_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    from quire.kernels.triton import compiling
    from quire.runtime.executor.single import COMPILING_SECONDS

    single, done = executor(), list[str]()
    monkeypatch.setattr(single, "_compiles", True)
    worker = single._worker
    assert worker is not None
    worker.take_warmup_left()
    worker._captures.extend((lambda: done.append("first"), lambda: done.append("second")))
    monkeypatch.setattr(compiling, "_begun", {"kernel": None})
    assert single.prepare_more() == COMPILING_SECONDS  # others are compiled still
    monkeypatch.setattr(compiling, "_begun", {})
    assert [single.prepare_more() for _ in range(3)] == [0.0, 0.0, None]
    assert done == ["first", "second"]

    def fail() -> None:
        raise RuntimeError("out of memory")

    worker._captures.extend((fail, lambda: done.append("third")))
    assert single.prepare_more() is single.prepare_more() is None
    assert "out of memory" in caplog.text
    assert done == ["first", "second"]
    single.close()
    assert single.prepare_more() is None


def test_nothing_is_prepared_on_a_cpu() -> None:
    single = executor()
    assert DEVICE != "cpu" or single.prepare_more() is None
    single.close()
