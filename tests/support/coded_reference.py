"""The gemm of experts with e2m1 codes in plain PyTorch, in place of the kernel for Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.cuda.coded_experts import CodedStack
from quire.kernels.triton.expand_codes import expand_codes
from quire.kernels.triton.grouped import Routing
from quire.kernels.triton.place_rows import PlacedRows


def rows_of(placed: PlacedRows, tile: int) -> Tensor:
    """The rows of a tile without the order of their chunks: [rows, inputs]."""
    count = int(placed.counts[tile])
    order = torch.arange(8)[None, :] ^ torch.arange(count)[:, None] % 8
    chunks = placed.data[tile, :, :count].transpose(0, 1).unflatten(2, (8, 8))
    return chunks.gather(2, order[:, None, :, None].expand_as(chunks)).flatten(1)


def put_rows(placed: PlacedRows, tile: int, rows: Tensor) -> None:
    """Write the rows of a tile in the order of `rows_of`, which is its own inverse."""
    order = torch.arange(8)[None, :] ^ torch.arange(len(rows))[:, None] % 8
    chunks = rows.unflatten(1, (-1, 8, 8))
    turned = chunks.gather(2, order[:, None, :, None].expand_as(chunks))
    placed.data[tile, :, : len(rows)] = turned.flatten(2).transpose(0, 1)


def reference_product(
    x: PlacedRows, stack: CodedStack, routing: Routing, *, activation: str | None = None, clamp: Clamp | None = None,
    early: bool = False, dependent: bool = False,
) -> PlacedRows | Tensor:  # fmt: skip
    """As `coded_gemm`; a gate is clamped silu."""
    pairs, tile = routing.chosen.numel(), x.tile
    out = torch.full((pairs, stack.outputs), float("nan"), dtype=x.data.dtype)
    made = PlacedRows(torch.full((len(x.data), stack.outputs // 128, tile, 64), float("nan")).to(x.data), x.counts)
    weight = torch.empty(stack.outputs, stack.inputs, dtype=torch.bfloat16)
    for number, expert in enumerate(routing.tile_experts.tolist()):
        if expert < 0:
            continue
        expand_codes(stack.data[expert], weight, interleaved=stack.interleaved)
        y = rows_of(x, number).float() @ weight.float().t()
        if stack.bias is not None:
            y += stack.bias[expert].float()
        if activation is None:
            out[routing.places[number * tile :][: len(y)].long()] = y.to(out.dtype)
            continue
        assert clamp is not None
        assert activation == "silu"
        gate, up = y.chunk(2, dim=1)
        kept, bounded = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        put_rows(made, number, (kept * torch.sigmoid(kept * clamp.alpha) * (bounded + clamp.shift)).to(x.data.dtype))
    return out if activation is None else made
