"""Times LoRA adapters in a decode step: python -m benchmarks.gpu.adapters --model llama-3.1-8b --batch 64

Runs the same steps twice, with random weights: rows without adapters, then each row with one of --adapters adapters of
all linear layers. Prints the time of both steps, and the bytes of A and B that a step reads.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.models import MODELS
from quire.config.adapters import AdapterConfig
from quire.config.arguments import EngineArguments
from quire.runtime.adapters.slots import AdapterSlots, HostAdapter, Pair, Target
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import resolve_model
from quire.serving.assembly import plan_engine
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StepPlan

CHUNK = 2_048  # prompt tokens per step


def make_executor(options: argparse.Namespace) -> SingleExecutor:
    """Return an executor with memory for the batch and the adapters."""
    longest = options.context + 4 * options.steps + 64
    blocks = -(-longest // options.block_size)
    with tempfile.TemporaryDirectory() as folder:
        files = resolve_model(str(MODELS[options.model].write(Path(folder))))
        arguments = EngineArguments(
            dtype=options.dtype, max_model_len=longest, max_num_seqs=max(8, options.batch),
            block_size=options.block_size, max_num_batched_tokens=CHUNK, num_kv_blocks=blocks * options.batch,
            enforce_eager=options.enforce_eager, quantization=options.quantization,
        )  # fmt: skip
        planned = plan_engine(files, arguments)
        adapters = AdapterConfig(slots=options.adapters, max_rank=options.rank, host_adapters=1)
        config = replace(planned.config, adapters=adapters)
        return SingleExecutor(files, planned.model, config, load_format=MODELS[options.model].load_format)


def random_adapter(slots: AdapterSlots, rank: int) -> HostAdapter:
    """Return an adapter of all linear layers with random values."""
    pairs = []
    for number, layer in enumerate(slots.layers):
        for place, part in enumerate(layer.parts):
            a = torch.randn(rank, layer.a.shape[2]).to(slots.dtype) * 0.01
            b = torch.randn(part.num_outputs, rank).to(slots.dtype) * 0.01
            pairs.append(Pair(Target(number, place), a, b))
    return HostAdapter("random", rank, tuple(pairs))


class Steps:
    """Runs plans made by hand: all rows compute their prompt, then decode."""

    def __init__(self, executor: SingleExecutor, options: argparse.Namespace) -> None:
        self._executor, self._options, self._step = executor, options, 0
        self._blocks = -(-(options.context + 4 * options.steps + 64) // options.block_size)

    def add(self, slots: Sequence[int]) -> None:
        """Place one row for each slot, and compute their prompts."""
        context = self._options.context
        for row, slot in enumerate(slots):
            tokens = (np.arange(context, dtype=np.int32) * 7 + row) % 9_000 + 10
            table = tuple(range(row * self._blocks, (row + 1) * self._blocks))
            sampling = SamplingParams(temperature=0.0)
            new = NewRow(row, tokens, context, table, sampling, TokenRules(), sample_index=0, seed=0, adapter=slot)
            for start in range(0, context, CHUNK):
                count = min(CHUNK, context - start)
                rows = (row,) if start + count == context else ()
                self._run(new_rows=() if start else (new,), chunks=(Chunk(row, start, count, rows),))

    def seconds(self) -> float:
        """Return the seconds of a decode step of all rows."""
        rows = np.arange(self._options.batch, dtype=np.int32)
        for _ in range(16):  # captures graphs
            self._run(decode_rows=rows)
        begin = time.perf_counter()
        for number in range(self._options.steps):
            self._launch(decode_rows=rows)
            if number:
                self._executor.collect()
        self._executor.collect()
        return (time.perf_counter() - begin) / self._options.steps

    def release(self) -> None:
        self._run(released=tuple(range(self._options.batch)))

    def _launch(self, **changes: object) -> None:
        self._executor.launch(StepPlan(self._step, **changes))  # type: ignore[arg-type]
        self._step += 1

    def _run(self, **changes: object) -> None:
        self._launch(**changes)
        assert not self._executor.collect().failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=64, help="different adapters in the batch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=512, help="tokens each sequence holds at the start")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), default=None)
    options = parser.parse_args()
    executor = make_executor(options)
    rows = executor.adapters
    assert rows is not None
    adapter, steps = random_adapter(rows.slots, options.rank), Steps(executor, options)
    for slot in range(options.adapters):
        rows.slots.put(slot, adapter)
    steps.add([-1] * options.batch)
    base = steps.seconds()
    steps.release()
    steps.add([row % options.adapters for row in range(options.batch)])
    adapted = steps.seconds()
    read = min(options.adapters, options.batch) * adapter.num_bytes
    print(
        f"{options.model}, batch {options.batch}, context {options.context}, {options.adapters} adapters of rank "
        f"{options.rank}: {base * 1e6:.0f} us without, {adapted * 1e6:.0f} us with "
        f"({100 * base / adapted:.0f} % of the throughput), {read / 1e9:.2f} GB of A and B a step"
    )
    executor.close()


if __name__ == "__main__":
    main()
