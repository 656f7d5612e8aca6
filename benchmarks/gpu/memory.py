"""Compares the memory plan with the memory used on the device: python -m benchmarks.gpu.memory --model qwen3-0.6b

Prints the plan of an engine, the device memory held after the start, and the peak memory of steps, each with the
planned value. Steps are prompts that fill every step, then as many rows as the engine may have: plain, with top_p and
with logprobs. Weights are random. Exits 1 if either differs from the plan by more than 2 % of the memory that the
engine may use; steps may take less.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import floor
from benchmarks.preemption import SHAPES
from quire.config.arguments import EngineArguments
from quire.config.memory_check import MOST_OFF, check_memory
from quire.config.sizes import format_size
from quire.engine.core import EngineCore
from quire.runtime.device_memory import read_device_memory
from quire.runtime.loading.resolve import resolve_model
from quire.serving.assembly import plan_engine
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9, "temperature": 1.0},
    "logprobs and a penalty": {"logprobs": 20, "frequency_penalty": 0.5},
}


def run_all(core: EngineCore, rows: int, length: int, way: dict[str, Any], rng: random.Random) -> None:
    """Run `rows` requests at once, whose prompts fill steps and which then decode together."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **way})
    for number in range(rows):
        prompt = tuple(rng.randrange(10, 9_000) for _ in range(length))
        core.submit(Submit(f"{number}", prompt, sampling, TokenRules()))
    while core.has_work:
        core.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SHAPES), default="qwen3-0.6b", help="a shape; the weights are random")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8_192)
    parser.add_argument("--max-num-batched-tokens", type=int, help="the engine's default when left out")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", choices=tuple(floor.KV_BYTES), default="auto")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = resolve_model(str(SHAPES[options.model].write(Path(folder))))
        names = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "quantization", "kv_cache_dtype")
        arguments = EngineArguments(device="cuda", **{name: getattr(options, name) for name in names})
        planned = plan_engine(files, arguments)
        print(planned.memory)
        core = planned.build("dummy", lambda *_: None)
    plan, device = planned.memory, planned.config.device.device
    assert planned.free_memory is not None
    check = check_memory(plan, planned.free_memory, read_device_memory(device))
    print(check)
    steps, rng, most = plan.activations + plan.sampling - plan.held_sampling + plan.masks // 2, random.Random(0), 0
    for name, way in WAYS.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_all(core, options.max_num_seqs, options.prompt, way, rng)
        taken = torch.cuda.max_memory_allocated() - before
        most = max(most, taken)
        print(f"steps, {name}: {format_size(taken)} at most, {format_size(steps)} were planned")
    after = read_device_memory(device)
    print(f"in the end {format_size(after.reserved)} are reserved, {format_size(after.free)} of the device are free")
    core.close()
    if check.is_off or most - steps > MOST_OFF * plan.capacity:
        sys.exit("the plan is off")


if __name__ == "__main__":
    main()
