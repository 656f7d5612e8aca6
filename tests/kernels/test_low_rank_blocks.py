"""The benchmark of LoRA in decode steps times what plain torch computes too."""

from __future__ import annotations

import argparse

import torch

from benchmarks.gpu.low_rank import Sizes, Step
from quire.config.model import Heads
from triton_cases import DEVICE


def test_blocks_with_adapters_are_changed_as_by_torch() -> None:
    options = argparse.Namespace(rows=6, adapters=4, rank=16, blocks=2)
    step = Step(Sizes(64, Heads(2, 1, 32), 96), options, DEVICE, "float32")
    without, wanted, found = (step.run(rows) for rows in (None, step.grouped, step.tiled))
    assert not torch.allclose(without, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
