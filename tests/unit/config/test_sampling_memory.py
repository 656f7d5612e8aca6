"""What choosing tokens and rotary positions take, beside the tensors that the runtime makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.config.engine import SchedulerConfig
from quire.config.model import QUERY_SCALE, Heads, Latent, Rope
from quire.config.sampling_memory import BYTES_PER_LOGIT, rotary_memory, sampling_memory
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.weights import Placement
from tests.unit.config.machines import LARGE, SMALL


def test_sampling_by_triton_takes_less_than_by_torch() -> None:
    scheduler = SchedulerConfig(max_num_seqs=512)
    by_torch, held = sampling_memory(LARGE, scheduler, "gather")
    assert (by_torch, held) == (512 * 128_256 * BYTES_PER_LOGIT, 0)
    by_triton, held = sampling_memory(LARGE, scheduler, "triton")
    assert held < 0.1 * by_triton
    assert by_triton < 0.5 * by_torch


def test_the_buffers_of_the_triton_sampler_are_those_that_it_makes() -> None:
    pytest.importorskip("triton")
    from quire.kernels.triton.logprobs import LogprobSpace
    from quire.kernels.triton.sampling import SampleSpace

    nowhere, scheduler = torch.device("meta"), SchedulerConfig(max_num_seqs=96)
    chosen = SampleSpace.make(96, LARGE.vocab_size, nowhere, filtered=True)
    assert chosen.filters is not None
    tensors = [*chosen[:-1], *chosen.filters, *LogprobSpace.make(96, LARGE.vocab_size, nowhere)]
    assert sampling_memory(LARGE, scheduler, "triton")[1] == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("length", [100, 2_048, 8_192])
@pytest.mark.parametrize("rope", [Rope(max_position=8_192), Rope(max_position=8_192, dim=32)])
def test_rotary_tables_are_as_large_as_planned(rope: Rope, length: int) -> None:
    rotary = Rotary(rope, rope.dim or 64, Placement(torch.bfloat16, torch.device("cpu")))
    rotary.angles(length + 1)  # the token that ends a full sequence is kept too
    made = rotary._table.nbytes + rotary._angles.nbytes
    assert rotary_memory(replace(SMALL, rope=rope), length, 2) == made


def test_every_kind_of_positions_has_a_table() -> None:
    plain = rotary_memory(SMALL, 2_048, 2)
    windows = (None, 512) * 15
    other = Rope(theta=1e6, max_position=8_192)
    assert rotary_memory(replace(SMALL, windows=windows, local_rope=other), 2_048, 2) == 2 * plain
    wide = replace(SMALL, windows=windows, local_heads=Heads(9, 3, 128))
    assert rotary_memory(wide, 2_048, 2) == 3 * plain
    assert rotary_memory(replace(SMALL, layers_without_rope=tuple(range(30))), 2_048, 2) == 0
    latent = replace(SMALL, latent=Latent(rank=512, nope_dim=128, rope_dim=32, value_dim=128))
    assert rotary_memory(latent, 2_048, 2) == plain // 2
    scaled = Rope(max_position=8_192, scaling=((QUERY_SCALE, 0.1),))
    assert rotary_memory(replace(SMALL, rope=scaled), 2_048, 2) == 2 * plain
    assert rotary_memory(replace(latent, rope=scaled), 2_048, 2) == plain // 2 + plain // 4
