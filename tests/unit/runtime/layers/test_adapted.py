"""What adapters change of a linear layer, computed beside the layer's gemm and after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.config.adapter_memory import MANY_TOKENS
from quire.kernels.reference.lora import Runs, add_low_rank
from quire.runtime.attention.branches import Launch
from quire.runtime.layers.adapted import ActiveAdapters, AdaptedPart, StackedAdapters
from quire.runtime.layers.split import as_split
from quire.runtime.layers.step import AdaptedRows, AdapterStep, AdapterTiles
from quire.runtime.worker.adapters import tile_rows, tile_tokens
from tiny_models import DEVICE

SLOTS, RANK, INPUTS, OUTPUTS = 3, 16, 32, 48
OF_ROWS = [2, -1, 0, 2, 1, -1]
RANKS = [[16, 16], [0, 16], [16, 0]]  # of three slots
WHOLE: list[Runs] = [[(0, 32)], [(32, 48)]]  # every output is of a part


class Noted:
    """A SideBranch without streams. It launches what is on the current stream first: the order must not matter."""

    def __init__(self) -> None:
        self.count = 0

    def run_beside(self, on_side: Launch, here: Launch) -> None:
        self.count += 1
        here()
        on_side()


def multiplied(parts: list[Runs], of_rows: Sequence[int] = OF_ROWS) -> tuple[int, bool, Tensor, Tensor]:
    """How often branches were taken, whether a change was left to be added, the changed outputs, the wanted ones."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(SLOTS, *size, generator=generator).to(DEVICE) for size in ((2 * RANK, INPUTS), (RANK, OUTPUTS)))
    b = b.transpose(1, 2)
    x, outputs = (torch.randn(len(of_rows), size, generator=generator).to(DEVICE) for size in (INPUTS, OUTPUTS))
    groups = [(slot, torch.tensor(np.flatnonzero(np.array(of_rows) == slot), device=DEVICE)) for slot in range(SLOTS)]
    wanted = outputs.clone()
    add_low_rank(wanted, x, a, b, groups, RANKS, parts)
    made = [AdaptedPart("", runs, None, False, (OUTPUTS, INPUTS), as_split(INPUTS)) for runs in parts]
    ranks, active, side = np.array(RANKS, dtype=np.int32), ActiveAdapters(), Noted()
    on_device = torch.from_numpy(ranks).to(DEVICE)
    layer = StackedAdapters(made, (a, b), active, (on_device, ranks), side=side)  # type: ignore[arg-type]
    arrays = tile_tokens(np.array(of_rows), tile_rows(len(of_rows)))
    tiles = AdapterTiles(*(torch.from_numpy(each).to(DEVICE) for each in arrays))
    active.begin(AdapterStep(AdaptedRows(tiles=tiles), AdaptedRows(tiles=tiles)))
    found, change = layer.multiply(outputs.clone, x)
    if change is not None:
        layer.join(found, change)
    return side.count, change is not None, found, wanted


def test_outputs_are_changed_by_the_adapters_of_its_rows() -> None:
    count, is_left, found, wanted = multiplied(WHOLE)
    assert (count, is_left) == (1, True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_outputs_of_no_part_are_left_as_they_are() -> None:
    count, is_left, found, wanted = multiplied([[(0, 16)], [(32, 48)]])
    assert (count, is_left) == (0, False), "a change would hold no numbers there"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_steps_of_many_rows_are_changed_after_the_gemm() -> None:
    """Their changes would need much memory of their own, which the memory plan does not count."""
    count, is_left, found, wanted = multiplied(WHOLE, OF_ROWS * (MANY_TOKENS // len(OF_ROWS) + 1))
    assert (count, is_left) == (0, False)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
