"""Phases of every kind, with random weights and caches, and how a program of them is compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.cuda.row_phases import AttentionPhase, GemvPhase, Phase, ScaledRowsWeight, Weight
from quire.kernels.norm import Norm
from quire.kernels.reference.cache_quantize import dequantize_heads, quantize_heads, split_heads
from quire.kernels.reference.quantize import quantize_rows, quantize_rows_int8
from quire.kernels.reference.row_program import ReferenceRowProgram
from quire.kernels.triton.gemm_w4 import pack_w4
from quire.kernels.triton.rotary import HeadNorms
from triton_cases import DEVICE, rand

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
MakeProgram = Callable[[Sequence[Phase], torch.device], Any]


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    """kind: "bf16", "fp8", "int8", or "nibbles" or "offsets" and the inputs of a group, as in "nibbles 64"."""
    wide = rand(outputs, inputs, seed=seed, scale=inputs**-0.5)
    if kind == "bf16":
        return wide.to(BF16)
    if kind in ("fp8", "int8"):
        numbers, scale = quantize_rows(wide) if kind == "fp8" else quantize_rows_int8(wide)
        return ScaledRowsWeight(numbers, scale)
    form, group = kind.split()
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8).to(DEVICE)
    shape = (outputs, inputs // int(group))
    scales = (rand(*shape, seed=seed + 1).abs() * 0.2 * inputs**-0.5).half()
    offsets = (rand(*shape, seed=seed + 2) * 0.5 * inputs**-0.5).half() if form == "offsets" else None
    return pack_w4(levels, scales, offsets)


def product_of(
    kind: str, outputs: int, inputs: int, *, bias: bool = False, norm: bool = False, activation: str | None = None,
    of_stream: bool = False, to_stream: bool = False, adds: bool = False, seed: int = 0,
) -> GemvPhase:  # fmt: skip
    """outputs: those of the target."""
    rows = outputs * (1 if activation is None else 2)
    return GemvPhase(
        weight_of(kind, rows, inputs, seed),
        None if of_stream else rand(inputs, dtype=BF16, seed=seed + 10),
        None if to_stream else rand(outputs, dtype=BF16, seed=seed + 11),
        rand(rows, dtype=BF16, seed=seed + 12) if bias else None,
        Norm(1.0 + rand(inputs, dtype=BF16, seed=seed + 13, scale=0.1), 1e-5) if norm else None,
        activation,
        adds,
    )


@dataclass(frozen=True)
class AttentionCase:
    """The sizes of an attention phase, and which kind of cache it has."""

    num_query: int = 8
    num_kv: int = 2
    dim: int = 128
    block: int = 16
    rotated: int | None = None  # numbers of a head; None: all
    norms: bool = False
    window: int | None = None
    sinks: bool = False
    cache: torch.dtype = BF16
    table: int = 0

    def make(self, max_length: int, seed: int = 0) -> tuple[AttentionPhase, list[Tensor]]:
        """The phase over a full cache, and block tables of three rows of so many tokens each."""
        line = -(-max_length // self.block)
        generator = torch.Generator().manual_seed(seed)
        tables = [
            torch.randperm(3 * line, generator=generator).int().view(3, line).to(DEVICE) for _ in range(self.table + 1)
        ]
        (key, key_scales), (value, value_scales) = (self._side(3 * line, seed + side) for side in range(2))
        rotated = self.dim if self.rotated is None else self.rotated
        weights = [1.0 + rand(self.dim, dtype=BF16, seed=seed + 20 + each, scale=0.1) for each in range(2)]
        rule = AttentionRule(
            self.dim**-0.5,
            window=self.window,
            sinks=rand(self.num_query, dtype=BF16, seed=seed) if self.sinks else None,
        )
        phase = AttentionPhase(
            rand((self.num_query + 2 * self.num_kv) * self.dim, dtype=BF16, seed=seed + 30),
            torch.zeros(self.num_query * self.dim, dtype=BF16, device=DEVICE),
            self.num_query, self.num_kv, self.dim,
            HeadNorms(weights[0], weights[1], 1e-6) if self.norms else None,
            _angles(max_length, rotated) if rotated else None, key, value,
            None if key_scales is None or value_scales is None else (key_scales, value_scales), self.table, rule,
        )  # fmt: skip
        return phase, tables

    def _side(self, blocks: int, seed: int) -> tuple[Tensor, Tensor | None]:
        """Keys or values, and their scales; blocks of another layer lie between those of this one."""
        numbers = rand(blocks, self.num_kv, self.block, self.dim, dtype=BF16, seed=seed + 40)
        if self.cache == BF16:
            memory = torch.full((blocks, 2, *numbers.shape[1:]), float("nan"), dtype=BF16, device=DEVICE)
            memory[:, 1] = numbers
            return memory[:, 1], None
        assert self.cache in (FLOAT8, torch.int8)
        room = self.block * (self.dim + 4)
        memory = torch.zeros(blocks, 2, self.num_kv, room, dtype=torch.uint8, device=DEVICE)
        held, scales = split_heads(memory[:, 1], self.cache, self.block, self.dim)
        for to, made in zip((held, scales), quantize_heads(numbers, self.cache), strict=True):
            to.copy_(made)
        return held, scales


def _angles(length: int, rotated: int) -> Tensor:
    angle = torch.arange(length)[:, None] / 10_000.0 ** (torch.arange(0, rotated, 2) / rotated)
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(BF16).to(DEVICE)


def check_program(
    make: MakeProgram, phases: Sequence[Phase], stream: Tensor, tables: Sequence[Tensor] = (),
    places: Sequence[tuple[int, int]] = ((0, 0),),
) -> None:  # fmt: skip
    """Run a program for each of some rows and positions, as the reference does, and compare all that it wrote.

    stream: [1, hidden]."""
    program, reference = make(phases, stream.device), ReferenceRowProgram(phases, stream.device)
    most = 2e-2 if len(phases) < 6 else 4e-2  # a stream of several layers is rounded, by 0.016 at 4, more than once
    for row, position in places:
        given = torch.tensor([position], device=DEVICE), torch.tensor([row], dtype=torch.int32, device=DEVICE)
        written = [stream, *_written(phases)]
        before = [tensor.clone() for tensor in written]
        program.run(stream, *given, tables)
        found = [tensor.clone() for tensor in _read(stream, phases)]
        _restore(written, before)
        reference.run(stream, *given, tables)
        if row < 0:  # vectors of padding mean nothing
            found = [
                mine if mine.dim() == 4 else wanted for mine, wanted in zip(found, _read(stream, phases), strict=True)
            ]
        for mine, wanted in zip(found, _read(stream, phases), strict=True):
            assert mine.shape == wanted.shape
            is_cache = mine.dim() == 4
            rounded = is_cache and any(isinstance(each, AttentionPhase) and each.scales for each in phases)
            near = {"rtol": 0.13, "atol": 2e-2} if rounded else {"rtol": 2e-2, "atol": most}
            torch.testing.assert_close(mine.float(), wanted.float(), **near, equal_nan=True)


def _written(phases: Sequence[Phase]) -> list[Tensor]:
    """What phases write, but for the stream."""
    targets = [phase.target for phase in phases if phase.target is not None]
    caches = [
        tensor
        for phase in phases
        if isinstance(phase, AttentionPhase)
        for tensor in (phase.key_cache, phase.value_cache, *(phase.scales or ()))
    ]
    return targets + caches


def _read(stream: Tensor, phases: Sequence[Phase]) -> list[Tensor]:
    """The same, with the stream, caches as they are read."""
    found = [stream, *(phase.target for phase in phases if phase.target is not None)]
    for phase in phases:
        if isinstance(phase, AttentionPhase):
            sides = zip((phase.key_cache, phase.value_cache), phase.scales or (None, None), strict=True)
            found += [side if scales is None else dequantize_heads(side, scales) for side, scales in sides]
    return found


def _restore(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)
