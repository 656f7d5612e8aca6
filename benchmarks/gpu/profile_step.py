"""Profiles a steady decode step: python -m benchmarks.gpu.profile_step --model llama-3.1-8b --batch 64

With --prompts it profiles prefill instead: as many prompts as --batch, of --context tokens each.

Prints the wall time of a step, the host's share of it, the share of time in which the GPU was busy, and the most
expensive kernels. Without --trace no file is written. With --group, layers all-reduce over a NCCL group of one rank,
which an engine with one rank does not do: this shows the cost of these launches on one GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from benchmarks.gpu import floor
from benchmarks.gpu.device_profile import profiled, show
from benchmarks.gpu.models import MODELS, find_model
from benchmarks.gpu.workloads import Workload
from quire.config.arguments import EngineArguments
from quire.engine.core import EngineCore
from quire.engine.executor import Executor
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import resolve_model
from quire.runtime.parallel.group import TorchGroup
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.serving.assembly import plan_engine
from quire.types.adapters import AdapterInfo
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import TransferReport


class TimedExecutor:
    """An executor that counts the seconds spent in launching and in waiting."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.launching = self.waiting = 0.0

    @property
    def depth(self) -> int:
        return self._inner.depth

    def launch(self, plan: StepPlan) -> None:
        begin = time.perf_counter()
        self._inner.launch(plan)
        self.launching += time.perf_counter() - begin

    def supply_masks(self, masks: Masks | None) -> None:
        begin = time.perf_counter()
        self._inner.supply_masks(masks)
        self.launching += time.perf_counter() - begin

    def collect(self) -> StepResult:
        begin = time.perf_counter()
        result = self._inner.collect()
        self.waiting += time.perf_counter() - begin
        return result

    def transfers(self) -> TransferReport:
        return self._inner.transfers()

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        return self._inner.read_adapter(name, folder)

    def forget_adapter(self, digest: str) -> None:
        self._inner.forget_adapter(digest)

    def close(self) -> None:
        self._inner.close()


def make_engine(options: argparse.Namespace) -> tuple[EngineCore, TimedExecutor]:
    """Return an engine with memory for `batch` sequences of `context` tokens that decode for some steps."""
    with tempfile.TemporaryDirectory() as folder:
        files = resolve_model(str(find_model(options.model).write(Path(folder))))
        longest = options.context + 40 + 4 * options.steps
        arguments = EngineArguments(
            dtype="bfloat16", max_model_len=longest, max_num_seqs=max(8, options.batch),
            block_size=options.block_size, enforce_eager=options.enforce_eager,
            quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype,
        )  # fmt: skip
        planned = plan_engine(files, arguments)
        ranks = one_rank() if options.group else ALONE
        executor = SingleExecutor(
            files, planned.model, planned.config, load_format=find_model(options.model).load_format, ranks=ranks
        )
    timed = TimedExecutor(executor)
    return EngineCore(timed, planned.config.cache, planned.config.scheduler, planned.model.vocab_size), timed


def submit(core: EngineCore, options: argparse.Namespace, number: int, max_tokens: int) -> None:
    """Submit the prompts of round `number`, which have no prefix in common with others."""
    sampling = SamplingParams(temperature=options.temperature, max_tokens=max_tokens, ignore_eos=True)
    for row in range(number * options.batch, (number + 1) * options.batch):
        prompt = array("i", [(7 * row + i) % 9_000 + 10 for i in range(options.context)])
        core.submit(Submit(str(row), prompt, sampling, TokenRules()))


def run_until(core: EngineCore, output_tokens: int) -> int:
    """Step until so many tokens were generated. Returns the number of steps."""
    steps = 0
    while core.stats().output_tokens < output_tokens:
        core.step()
        steps += 1
    return steps


def decode(core: EngineCore, options: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs some steps in which all sequences decode and nothing else happens."""
    submit(core, options, 0, 40 + 4 * options.steps)
    run_until(core, options.batch * 20)

    def steps() -> int:
        for _ in range(options.steps):
            core.step()
        return int(options.steps)

    return steps


def read_prompts(core: EngineCore, options: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the steps of a round of prompts. One round has been run before."""
    rounds = count()

    def steps() -> int:
        number = next(rounds)
        submit(core, options, number, 1)
        return run_until(core, (number + 1) * options.batch)

    steps()
    return steps


def one_rank() -> Ranks:
    """Return a single rank whose layers all-reduce over a group, unlike those of an engine with one rank."""
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    return replace(ALONE, tensor=TorchGroup([0], "nccl", 60.0))


def least_seconds(options: argparse.Namespace, steps: int) -> float:
    """Return the floor of a step in seconds."""
    model, precision = find_model(options.model), floor.Precision.of(options.quantization, options.kv_cache_dtype)
    if options.prompts:
        prompts = Workload([[1] * options.context] * options.batch, [1] * options.batch)
        return floor.prefill_seconds(model, prompts, precision) / steps
    return floor.step_seconds(model, options.batch, options.batch * (options.context + 40), precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"of {', '.join(MODELS)}, or the path of any other shape's config.json"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens each sequence holds at the start")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--prompts", action="store_true", help="read prompts instead of decoding; --steps does not count"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), default=None)
    parser.add_argument("--kv-cache-dtype", choices=tuple(floor.KV_BYTES), default="auto")
    parser.add_argument("--group", action="store_true", help="sum over a NCCL group of one rank")
    parser.add_argument("--top", type=int, default=14, help="kernels to list")
    parser.add_argument("--trace", type=Path, help="keep the trace here")
    options = parser.parse_args()
    try:
        find_model(options.model)
    except ValueError as error:
        parser.error(f"--model {error}")
    core, timed = make_engine(options)
    work = (read_prompts if options.prompts else decode)(core, options)
    timed.launching = timed.waiting = 0.0
    begin = time.perf_counter()
    steps = work()
    wall = time.perf_counter() - begin
    least = least_seconds(options, steps)
    print(
        f"{options.model}, batch {options.batch}, context {options.context}: step {wall / steps * 1e6:.0f} us, "
        f"floor {least * 1e6:.0f} us ({100 * least * steps / wall:.0f} %)\n"
        f"host: {(wall - timed.waiting) / steps * 1e6:.0f} us a step at work, "
        f"{timed.launching / steps * 1e6:.0f} us of them launching; {timed.waiting / steps * 1e6:.0f} us waiting"
    )
    counted: list[int] = []
    events = profiled(lambda: counted.append(work()), options.trace)
    if not events:
        print("the profiler saw no device work")
        return
    show(events, options.top, steps=counted[0])
    core.close()


if __name__ == "__main__":
    main()
