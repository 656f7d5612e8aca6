"""Numbers as blocks of the GGUF types: those of the package gguf, and those that it only reads. Levels are rounded to
the nearest, scales are what the largest number of a group needs: right blocks, not the best ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.runtime.loading.gguf.simple_quants import IQ4_LEVELS

BLOCK = 256  # numbers of a super-block


def encode(values: np.ndarray, name: str) -> bytes:
    """`values` [rows, inputs] as blocks of the type; inputs are a multiple of its block."""
    if name in ENCODERS:
        return ENCODERS[name](torch.from_numpy(values).reshape(-1, 32 if name == "IQ4_NL" else BLOCK)).numpy().tobytes()
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return bytes(quantize(values, GGMLQuantizationType[name]).tobytes())


def _pack(fields: Tensor, bits: int) -> Tensor:
    """Fields along the axis before the last, lowest first: [..., count, w] -> [..., w] uint8."""
    packed = torch.zeros_like(fields[..., 0, :])
    for place in range(fields.shape[-2]):
        packed |= fields[..., place, :] << (bits * place)
    return packed.to(torch.uint8)


def _half(values: Tensor) -> Tensor:  # [n] -> bytes [n, 2]
    return values.half().unsqueeze(1).view(torch.uint8)


def _rounded_half(values: Tensor) -> Tensor:
    """As a block holds them, and never zero."""
    return values.half().float().clamp(min=2.0**-24)


def _join(*parts: Tensor) -> Tensor:
    return torch.cat([part.reshape(len(part), -1).to(torch.uint8) for part in parts], dim=1)


def _with_minima(x: Tensor, groups: int, levels: int, codes: int) -> tuple[Tensor, ...]:
    """Scales and minima of groups as codes [n, groups] of a scale and a minimum of the block, and levels [n, 256]."""
    each = x.view(len(x), groups, -1)
    low, high = each.amin(dim=2).clamp(max=0), each.amax(dim=2).clamp(min=0)
    scale, minimum = (high - low) / levels, -low
    d, dmin = _rounded_half(scale.amax(dim=1) / codes), _rounded_half(minimum.amax(dim=1) / codes)
    scales = (scale / d[:, None]).round().clamp(1, codes)
    minima = (minimum / dmin[:, None]).round().clamp(0, codes)
    shifted = each + (dmin[:, None] * minima)[..., None]
    found = (shifted / (d[:, None] * scales)[..., None]).round().clamp(0, levels)
    return d, dmin, scales.int(), minima.int(), found.view(len(x), -1).int()


def _symmetric(x: Tensor, groups: int, least: int, codes: int) -> tuple[Tensor, Tensor, Tensor]:
    """A scale of the block, codes [n, groups] of the groups' scales, and levels [n, 256] from `least` to -least - 1."""
    each = x.view(len(x), groups, -1)
    scale = each.abs().amax(dim=2) / -least
    d = _rounded_half(scale.amax(dim=1) / codes)
    scales = (scale / d[:, None]).round().clamp(1, codes)
    found = (each / (d[:, None] * scales)[..., None]).round().clamp(least, -least - 1)
    return d, scales.int(), found.view(len(x), -1).int()


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:  # [n, 8] twice -> [n, 12]
    upper = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, minima)]
    return _join(*upper, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4)


def _q2_k(x: Tensor) -> Tensor:
    d, dmin, scales, minima, levels = _with_minima(x, 16, 3, 15)
    return _join(scales | minima << 4, _pack(levels.view(-1, 2, 4, 32), 2), _half(d), _half(dmin))


def _q3_k(x: Tensor) -> Tensor:
    d, scales, levels = _symmetric(x, 16, -4, 31)
    levels, codes = levels + 4, scales + 32
    high, low = _pack((levels >> 2).view(-1, 8, 32), 1), _pack((levels & 3).view(-1, 2, 4, 32), 2)
    return _join(high, low, _pack((codes & 15).view(-1, 2, 8), 4), _pack((codes >> 4).view(-1, 4, 4), 2), _half(d))


def _q4_k(x: Tensor) -> Tensor:
    d, dmin, scales, minima, levels = _with_minima(x, 8, 15, 63)
    return _join(_half(d), _half(dmin), _six_bits(scales, minima), _pack(levels.view(-1, 4, 2, 32), 4))


def _q5_k(x: Tensor) -> Tensor:
    d, dmin, scales, minima, levels = _with_minima(x, 8, 31, 63)
    high, low = _pack((levels >> 4).view(-1, 8, 32), 1), _pack((levels & 15).view(-1, 4, 2, 32), 4)
    return _join(_half(d), _half(dmin), _six_bits(scales, minima), high, low)


def _q6_k(x: Tensor) -> Tensor:
    d, scales, levels = _symmetric(x, 16, -32, 127)
    levels = levels + 32
    low, high = _pack((levels & 15).view(-1, 2, 2, 64), 4), _pack((levels >> 4).view(-1, 2, 4, 32), 2)
    return _join(low, high, scales, _half(d))


def _q8_k(x: Tensor) -> Tensor:
    d = (x.abs().amax(dim=1) / 127).clamp(min=1e-30)
    levels = (x / d[:, None]).round().to(torch.int8)
    sums = levels.view(-1, 16, 16).sum(dim=2).short()
    return _join(d.unsqueeze(1).view(torch.uint8), levels.view(torch.uint8), sums.view(torch.uint8))


def _places(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest of the sixteen levels to x over its scale [n, groups]."""
    wide = x.view(*scale.shape, -1) / scale[..., None]
    between = (IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2
    return torch.bucketize(wide.contiguous(), between).int()


def _iq4_xs(x: Tensor) -> Tensor:
    scale = x.view(len(x), 8, 32).abs().amax(dim=2) / 120
    d = _rounded_half(scale.amax(dim=1) / 31)
    codes = (scale / d[:, None]).round().clamp(1, 31).int()
    places = _places(x, d[:, None] * codes).view(-1, 8, 2, 16)
    codes = codes + 32
    high = _pack((codes >> 4).view(-1, 2, 4, 1), 2)
    return _join(_half(d), high, _pack((codes & 15).view(-1, 4, 2, 1), 4), _pack(places, 4))


def _iq4_nl(x: Tensor) -> Tensor:
    d = _rounded_half(x.abs().amax(dim=1) / 120)
    return _join(_half(d), _pack(_places(x, d[:, None]).view(-1, 2, 16), 4))


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
}
