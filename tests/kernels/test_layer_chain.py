"""The layers that are timed on a GPU, at the most rows that a skinny gemm takes: every kernel after the other."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.rest_layers import BLOCK, Chain, Sizes
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import MOST_ROWS
from triton_cases import DEVICE

TINY = Sizes("tiny", hidden=32, intermediate=32, queries=2, keys=1, layers=1, dim=16)
MARGIN, POISON = 64, 12345.0


@pytest.mark.parametrize("rows", [1, 17, MOST_ROWS])
def test_a_chain_of_layers_stays_inside_its_memory(rows: int) -> None:
    guarded = torch.full((2 * MARGIN + (1 << 16),), POISON, device=DEVICE)
    counters = torch.zeros(MARGIN + 16, dtype=torch.int32, device=DEVICE)
    chain = Chain(TINY, rows, "bf16", Workspace(guarded[MARGIN:-MARGIN], counters[:16]), torch.float32)
    chain.run(False)
    assert bool((guarded[:MARGIN] == POISON).all())
    assert bool((guarded[-MARGIN:] == POISON).all())
    assert not counters.any()
    assert bool(chain.residual.isfinite().all())


def test_every_row_of_a_chain_finds_its_own_slot() -> None:
    chain = Chain(TINY, MOST_ROWS, "bf16", Workspace.make(DEVICE, numbers=1 << 16, tiles=16), torch.float32)
    chain.run(False)
    places = chain.positions.long()
    blocks = chain.blocks.gather(1, (places // BLOCK)[:, None]).squeeze(1).long()
    wanted = torch.zeros(chain.memory.key.shape[0], BLOCK, dtype=torch.bool, device=DEVICE)
    wanted[blocks, places % BLOCK] = True
    for cache in chain.memory[:2]:
        assert torch.equal(cache.any(dim=-1).any(dim=1), wanted)
