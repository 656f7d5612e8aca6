"""The benchmark of LoRA in decode steps computes the same by every way that it times."""

from __future__ import annotations

import argparse

import torch

from benchmarks.gpu.low_rank import WAYS, Sizes, Step
from quire.config.model import Heads
from triton_cases import DEVICE


def test_every_way_changes_the_stream_alike() -> None:
    options = argparse.Namespace(rows=6, adapters=4, rank=16, blocks=2)
    step = Step(Sizes(64, Heads(2, 1, 32), 96), options, DEVICE, "float32")
    with step.by(WAYS[0]):
        without, wanted = step.run(adapts=False), step.run()
    assert not torch.allclose(without, wanted, rtol=1e-3, atol=1e-3)
    for way in WAYS[1:]:
        with step.by(way):
            torch.testing.assert_close(step.run(), wanted, rtol=1e-4, atol=1e-4)
