"""Block moves against plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import copy as reference
from quire.kernels.triton.copy import copy_blocks, fetch_blocks, gather_blocks, scatter_blocks, send_blocks
from triton_cases import DEVICE, rand

DTYPES = [torch.float32, torch.float16, torch.float8_e4m3fn]


def _memory(dtype: torch.dtype) -> torch.Tensor:
    return rand(4, 9, 2, 3, 8).to(dtype)  # [planes, blocks, kv heads, block, dim]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_blocks_are_copied_in_every_plane_and_padding_copies_nothing(dtype: torch.dtype, integer: torch.dtype) -> None:
    found = _memory(dtype)
    wanted = found.clone()
    pairs = torch.tensor([(0, 3), (5, 8), (-1, 4), (1, -1), (0, 2)], dtype=integer, device=DEVICE)
    copy_blocks(found, pairs)
    reference.copy_blocks(wanted, pairs)
    assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_blocks_are_scattered_back_to_other_places(dtype: torch.dtype) -> None:
    memory, staging = _memory(dtype), torch.zeros(5, 4, 2, 3, 8, device=DEVICE).to(dtype)
    wanted_staging = staging.clone()
    ids = torch.tensor([7, -1, 0, 4], device=DEVICE)
    gather_blocks(memory, ids, staging)
    reference.gather_blocks(memory, ids, wanted_staging)
    assert torch.equal(staging.float(), wanted_staging.float())

    wanted = memory.clone()
    places = torch.tensor([1, 2, -1, 8], device=DEVICE)
    scatter_blocks(staging, places, memory)
    reference.scatter_blocks(staging, places, wanted)
    assert torch.equal(memory.float(), wanted.float())


def test_blocks_come_and_go_through_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device to pin memory for")
    memory, staging = _memory(torch.float16), torch.zeros(2, 4, 2, 3, 8, dtype=torch.float16).pin_memory()
    ids = torch.tensor([7, 3], device=DEVICE)
    gather_blocks(memory, ids, staging)
    torch.cuda.synchronize()
    assert torch.equal(staging, memory[:, [7, 3]].transpose(0, 1).cpu())
    scatter_blocks(staging, ids.flip(0), memory)
    assert torch.equal(memory[:, 3].cpu(), staging[0])


def test_a_staging_buffer_that_is_too_small_is_refused() -> None:
    ids = torch.tensor([1, 2], device=DEVICE)
    with pytest.raises(ValueError, match="too small"):
        gather_blocks(_memory(torch.float32), ids, torch.zeros(1, 4, 2, 3, 8, device=DEVICE))


@pytest.mark.parametrize("numbers", [12, 33_000])  # less than a program moves, and more; the former aligned to 8 bytes
def test_blocks_cross_to_any_reachable_addresses_and_back(numbers: int) -> None:
    staging = rand(3, 1, numbers).to(torch.float16)
    host = torch.zeros(5, 1, numbers, dtype=torch.float16)
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    size, first = host[0].nbytes, host.data_ptr()
    send_blocks(staging, torch.tensor([first + 4 * size, 0, first + size], device=DEVICE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    wanted = torch.zeros_like(host)
    wanted[4], wanted[1] = staging[0].cpu(), staging[2].cpu()
    assert torch.equal(host, wanted)

    back = torch.full_like(staging, 7)
    fetch_blocks(torch.tensor([0, first + size], device=DEVICE), back)
    assert torch.equal(back[1], staging[2])
    assert back[0].eq(7).all()
    assert back[2].eq(7).all()


def test_addresses_that_are_no_int64_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        send_blocks(torch.zeros(2, 4, 8, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE))
