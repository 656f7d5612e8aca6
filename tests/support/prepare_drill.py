"""Prepares a worker as on an H200, on any machine, and prints which kernels its first requests, plain and under a
grammar, still have compiled.

A process of its own, as compile_drill; no kernel is ever launched.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from triton import knobs
from triton.runtime import driver

from compile_drill import H200
from quire.kernels.triton.compiling import compiling_only
from quire.runtime import accelerator
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import BlockCopy, Chunk, Masks, NewRow, StepPlan
from tiny_models import engine_config, tiny_config


def main() -> None:
    driver.set_active(H200())
    accelerator.__dict__["_why_no_compiler"] = lambda device: None
    compiled: list[str] = []
    knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    usual = engine_config(block_size=16, rows=1)
    config = replace(
        usual, device=replace(usual.device, attention_backend="triton", dtype="bfloat16", kv_dtype="bfloat16")
    )
    with compiling_only():
        files = ModelFiles("tiny", Path("nowhere"), "hf")
        worker = SingleExecutor(files, tiny_config(), config, load_format="dummy")._worker
        assert worker is not None
        worker.prepare(0.0)
        while worker.prepare_more():  # as while there are no requests
            pass
    prepared = len(compiled)
    tokens = np.array([1, 2, 3], dtype=np.int32)
    row = NewRow(0, tokens, 3, (0,), SamplingParams(temperature=0.0), TokenRules(), sample_index=0, seed=7)
    with compiling_only(), torch.inference_mode():
        worker.execute(StepPlan(step=0, new_rows=(row,), chunks=(Chunk(0, 0, 3, (0,)),)))
        worker.execute(StepPlan(step=1, decode_rows=np.array([0], dtype=np.int32)))
        worker.execute(StepPlan(step=2, decode_rows=np.array([0], dtype=np.int32), copies=(BlockCopy(0, 1),)))
        worker.begin(StepPlan(step=3, decode_rows=np.array([0], dtype=np.int32), guided=True))
        bits = np.ones((1, 2), dtype=np.uint32)
        worker.supply_masks(Masks(np.array([0], dtype=np.int32), bits))
    print(json.dumps({"prepared": sorted(set(compiled[:prepared])), "later": compiled[prepared:]}))


if __name__ == "__main__":
    main()
