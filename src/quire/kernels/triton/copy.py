"""Copies whole cache blocks of all layers in one launch: between blocks, to and from a staging buffer, and between that
and host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, power_of_two

_WORDS = 4096  # 8-byte words per program
_CROSSING_PROGRAMS = 32  # per transfer over PCIe: enough to saturate it, and to leave room for other kernels


@triton.jit
def _move_kernel(
    source_ptr, target_ptr, source_ids_ptr, target_ids_ptr,
    source_block_stride, source_plane_stride, target_block_stride, target_plane_stride, ids_stride, words,
    SOURCE_IN_ORDER: tl.constexpr, TARGET_IN_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy blocks. One program per (entry, plane, block of words)."""
    entry, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source, target = entry, entry
    if not SOURCE_IN_ORDER:
        source = tl.load(source_ids_ptr + entry * ids_stride).to(tl.int64)
    if not TARGET_IN_ORDER:
        target = tl.load(target_ids_ptr + entry * ids_stride).to(tl.int64)
    inside = (word < words) & (source >= 0) & (target >= 0)
    x = tl.load(source_ptr + source * source_block_stride + plane * source_plane_stride + word, mask=inside)
    tl.store(target_ptr + target * target_block_stride + plane * target_plane_stride + word, x, mask=inside)


def copy_blocks(memory: Tensor, pairs: Tensor) -> None:
    """Copy block pairs[i, 0] to block pairs[i, 1] in every plane of memory [planes, blocks, ...], contiguous.

    A plane is the keys or the values of a layer. pairs is [n, 2], int, on the device; a pair with a negative number is
    padding. No target may be another pair's source or target, since the copies run in no order.
    """
    words = _words(memory, 2)  # [planes, blocks, words]
    check(pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.is_contiguous(), "pairs is [n, 2], contiguous")
    _move(words, words, pairs, pairs.view(-1)[1:], len(pairs), (words.stride(1), words.stride(0)) * 2, 2)


def gather_blocks(memory: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks [n] of memory [planes, blocks, ...] to staging [n or more, planes, ...]. Negative ids are skipped.

    The staging buffer, on the device or in pinned host memory, stores a block's planes contiguously.
    """
    cache, buffer = _words(memory, 2), _words(staging, 2)
    _check_staging(cache, buffer, block_ids)
    strides = (cache.stride(1), cache.stride(0), buffer.stride(0), buffer.stride(1))
    _move(cache, buffer, block_ids, None, len(block_ids), strides, 1)


def scatter_blocks(staging: Tensor, block_ids: Tensor, memory: Tensor) -> None:
    """Copy staging [n or more, planes, ...] back to blocks [n] of memory. Negative ids are skipped."""
    cache, buffer = _words(memory, 2), _words(staging, 2)
    _check_staging(cache, buffer, block_ids)
    strides = (buffer.stride(0), buffer.stride(1), cache.stride(1), cache.stride(0))
    _move(buffer, cache, None, block_ids, len(block_ids), strides, 1)


@triton.jit(do_not_specialize=["count"])
def _cross_kernel(
    staging_ptr, addresses_ptr, count, words,
    TO_HOST: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy between staging and host memory. Programs loop over tiles of BLOCK words."""
    tiles = tl.cdiv(words, BLOCK)
    for tile in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        entry = (tile // tiles).to(tl.int64)
        word = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        address = tl.multiple_of(tl.load(addresses_ptr + entry), ALIGNMENT)
        inside = (word < words) & (address != 0)
        host = address.to(tl.pointer_type(tl.int64)) + word
        staged = staging_ptr + entry * words + word
        if TO_HOST:
            tl.store(host, tl.load(staged, mask=inside), mask=inside)
        else:
            tl.store(staged, tl.load(host, mask=inside), mask=inside)


def send_blocks(staging: Tensor, addresses: Tensor) -> None:
    """Copy blocks of `staging` [n or more, planes, ...] to n host addresses [n], int64, on the device; address 0 is
    padding.

    The memory there must be pinned or otherwise device-accessible, and stores a block's planes contiguously.
    """
    _cross(staging, addresses, to_host=True)


def fetch_blocks(addresses: Tensor, staging: Tensor) -> None:
    """Copy blocks from host addresses back to `staging`, as `send_blocks` in reverse."""
    _cross(staging, addresses, to_host=False)


def _cross(staging: Tensor, addresses: Tensor, *, to_host: bool) -> None:
    buffer = _words(staging, 1)  # [blocks, words]
    listed = addresses.dim() == 1 and addresses.dtype == torch.int64 and addresses.is_contiguous()
    check(listed, "addresses is a contiguous vector of int64")
    check(len(addresses) <= len(buffer), "staging is too small")
    words, count = buffer.shape[1], len(addresses)
    block = min(power_of_two(words), _WORDS)
    programs = min(_CROSSING_PROGRAMS, count * triton.cdiv(words, block))
    if programs:
        _cross_kernel[(programs,)](
            buffer, addresses, count, words, TO_HOST=to_host, ALIGNMENT=16 if words % 2 == 0 else 8, BLOCK=block,
            num_warps=max(1, min(8, block // 256)), num_stages=1,
        )  # fmt: skip


def _move(
    source: Tensor,
    target: Tensor,
    source_ids: Tensor | None,
    target_ids: Tensor | None,
    count: int,
    strides: tuple[int, int, int, int],  # source block and plane, target block and plane
    ids_stride: int,
) -> None:
    if count == 0:
        return
    words = source.shape[2]
    planes = source.shape[1] if source_ids is None else source.shape[0]
    block = min(power_of_two(words), _WORDS)
    _move_kernel[(count, planes, triton.cdiv(words, block))](
        source, target, source_ids, target_ids, *strides, ids_stride, words,
        SOURCE_IN_ORDER=source_ids is None, TARGET_IN_ORDER=target_ids is None, BLOCK=block,
        num_warps=max(1, min(8, block // 256)), num_stages=1,
    )  # fmt: skip


def _words(x: Tensor, kept: int) -> Tensor:
    """Return x as 8-byte words, with all dimensions after the first `kept` flattened. Raises ValueError if that is
    impossible."""
    flat = x.flatten(kept)
    fits = x.is_contiguous() and flat.shape[-1] * x.element_size() % 8 == 0
    check(fits, "memory must be contiguous and a block's bytes a multiple of 8")
    return flat.view(torch.int64)


def _check_staging(cache: Tensor, buffer: Tensor, block_ids: Tensor) -> None:
    check(buffer.shape[1:] == (cache.shape[0], cache.shape[2]), "staging is [n, planes, numbers of a block]")
    check(block_ids.dim() == 1 and block_ids.is_contiguous(), "block_ids is a contiguous vector")
    check(len(block_ids) <= len(buffer), "staging is too small")
