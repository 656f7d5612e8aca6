"""The phases of a one-row decode step in plain torch: the reference for the kernel in `kernels/cuda/row_program.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cuda.row_phases import AttentionPhase, GemvPhase, Phase, ScaledRowsWeight, Weight
from quire.kernels.reference.attention import paged_attention
from quire.kernels.reference.cache_quantize import quantize_heads
from quire.kernels.reference.elementwise import rms_norm, rotate
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.gemm_w4 import PackedW4, unpack_w4


class ReferenceRowProgram:
    """Runs the phases in order, on any device and in any dtype. Synchronizes with the device.

    A gemv phase computes in float32 from the norm through bias, activation, gate and residual addition, and rounds
    once, to the dtype of its target. In an attention phase, heads are rounded to the dtype of the source after the head
    norm, after multiplying by its weight, and after the rotation; keys and values are stored in the cache so rounded.
    Scores and the weighted sum of values are float32. A token whose position is past the end of its block table row is
    not stored, and its output is undefined.
    """

    longest = 1 << 30  # limit of the context length in tokens: none

    def __init__(self, phases: Sequence[Phase], device: torch.device) -> None:  # noqa: ARG002
        self.phases = tuple(phases)

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        """See RowProgram.run. A padding row (negative) leaves the stream unchanged."""
        row, position = int(rows[0]), int(positions[0])
        if row < 0:
            return
        for phase in self.phases:
            if isinstance(phase, GemvPhase):
                _multiply(phase, stream[0])
            else:
                _attend(phase, position, tables[phase.table][row].long())


def _multiply(phase: GemvPhase, stream: Tensor) -> None:
    source = stream if phase.source is None else phase.source
    target = stream if phase.target is None else phase.target
    result = gemm(
        source[None], numbers_of(phase.weight), bias=phase.bias, residual=target[None] if phase.adds else None,
        activation=phase.activation, norm=phase.norm,
    )  # fmt: skip
    target.copy_(result[0])


def numbers_of(weight: Weight) -> Tensor:
    """Return a weight [outputs, inputs] dequantized to float32."""
    if isinstance(weight, PackedW4):
        return unpack_w4(weight)
    if isinstance(weight, ScaledRowsWeight):
        return weight.numbers.float() * weight.scale[:, None]
    return weight.float()


def _attend(phase: AttentionPhase, position: int, blocks: Tensor) -> None:
    """Run one attention phase. `blocks` [max blocks] is the row's block table."""
    heads = phase.source.view(1, -1, phase.dim)
    query, key, value = heads.split([phase.num_query, phase.num_kv, phase.num_kv], dim=1)
    if phase.norms is not None:
        query = rms_norm(query, phase.norms.query, phase.norms.eps).to(heads.dtype)
        key = rms_norm(key, phase.norms.key, phase.norms.eps).to(heads.dtype)
    if phase.angles is not None:
        cos, sin = phase.angles[position].float().chunk(2)
        query, key = (rotate(each.float(), cos[None], sin[None]).to(heads.dtype) for each in (query, key))
    size = phase.key_cache.shape[2]
    if position < len(blocks) * size:
        _store(phase, key[0], value[0], int(blocks[position // size]), position % size)
    rule, last = phase.rule, min(position, len(blocks) * size - 1)
    seen = last + 1 if rule.window is None else min(rule.window, last + 1)
    first = (last + 1 - seen) // size  # earlier blocks have left the window and may hold other data
    key_scales, value_scales = phase.scales or (None, None)
    attended = paged_attention(
        query, phase.key_cache, phase.value_cache, blocks[first : last // size + 1], last - first * size, rule.scale,
        window=rule.window, softcap=rule.softcap, sinks=rule.sinks, key_scale=rule.key_scale,
        value_scale=rule.value_scale, key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    phase.target.copy_(attended.flatten())


def _store(phase: AttentionPhase, key: Tensor, value: Tensor, block: int, slot: int) -> None:
    """Write the new key and value [kv heads, dim] into a slot of a block, quantized if the cache has scales."""
    for side, (cache, new) in enumerate(((phase.key_cache, key), (phase.value_cache, value))):
        if phase.scales is None:
            cache[block, :, slot] = new.to(cache.dtype)
            continue
        numbers, scales = quantize_heads(new, cache.dtype)
        cache[block, :, slot] = numbers
        phase.scales[side][block, :, slot] = scales
