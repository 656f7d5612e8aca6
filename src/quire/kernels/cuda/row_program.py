"""Runs phases as one persistent kernel (megakernel): one block on every multiprocessor, each of which runs all phases.

In a phase a block waits only for the values that it reads, which takes about two microseconds, less than a launch.
Meanwhile memory is read: warps copy weights to shared memory ahead of time, across phases. See row_program.cu and the
files it includes. All blocks must be resident at once, so nothing else may occupy a multiprocessor permanently, such as
a second kernel of this kind that shares the GPU by MPS.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cuda.nvrtc import CudaError, CudaKernel, compile_source, why_no_nvrtc
from quire.kernels.cuda.row_phases import AttentionPhase, GemvPhase, Phase, ScaledRowsWeight
from quire.kernels.cuda.row_records import (
    DIMS,
    MOST_QUERIES,
    MOST_TABLES,
    SMALL,
    TILE,
    UNIT,
    WARPS,
    PhaseRecord,
    RunRecord,
    Sizes,
    SourceRecord,
    Vectors,
    constants_of,
    lay_out,
    name_of,
    queries_and_dim,
    shared_limit,
)
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.gemm_w4 import PackedW4
from quire.kernels.triton.launch import num_processors

_FILES = (
    "row_common.cuh",
    "row_ring.cuh",
    "row_inputs.cuh",
    "row_gemv.cuh",
    "row_heads.cuh",
    "row_attention.cuh",
    "row_program.cu",
)
_CAPABILITY = 9  # major compute capability that the kernel was written for and tested on
_ALIGNED = 16
_NORM_DTYPES = (torch.bfloat16, torch.float32)
_MOST_LAYER_BYTES = 512 << 20  # of bfloat16 weights; it was faster with 416 MiB, and not tested with more
# Context length up to which it was faster, with 4-bit weights and with others; its attention is slower than that of
# other kernels.
_LONGEST_NIBBLES, _LONGEST = 16_384, 4_096


@cache
def why_not_row_program(device: torch.device) -> str | None:
    """Return why the kernel cannot run on a device; None if it can."""
    if device.type != "cuda":
        return "it runs only on CUDA devices"
    if torch.cuda.get_device_capability(device)[0] != _CAPABILITY:
        return "it runs only on Hopper GPUs"
    return why_no_nvrtc()


def takes_phase(phase: Phase) -> bool:
    """Whether the kernel supports this phase."""
    return _takes_attention(phase) if isinstance(phase, AttentionPhase) else _takes_gemv(phase)


def why_not_faster(phases: Sequence[Phase]) -> str | None:
    """Return why phases run faster as separate kernels, as measured on an H200; None if they do not. With many bytes
    per layer there is little to gain, and 8-bit weights are not converted fast enough."""
    weights = [phase.weight for phase in phases if isinstance(phase, GemvPhase)]
    if any(isinstance(weight, ScaledRowsWeight) for weight in weights):
        return "other kernels are faster with 8-bit weights"
    layers = sum(isinstance(phase, AttentionPhase) for phase in phases)
    plain = sum(weight.numel() * weight.element_size() for weight in weights if isinstance(weight, Tensor))
    if plain > _MOST_LAYER_BYTES * max(layers, 1):
        return f"other kernels are as fast with {plain // max(layers, 1) >> 20} MiB of weights per layer"
    return None


def _takes_attention(phase: AttentionPhase) -> bool:
    caches, rule, norms = (phase.key_cache, phase.value_cache), phase.rule, phase.norms
    is_plain = phase.key_cache.dtype == torch.bfloat16 and phase.scales is None
    is_scaled = phase.key_cache.dtype in SMALL and phase.scales is not None
    return (
        phase.dim in DIMS
        and phase.num_query % phase.num_kv == 0
        and phase.num_query // phase.num_kv <= MOST_QUERIES
        and phase.table < MOST_TABLES
        and (is_plain or is_scaled)
        and all(_is_aligned(cache) and cache.stride(3) == 1 and cache.stride(2) == phase.dim for cache in caches)
        and all(stride % 8 == 0 for cache in caches for stride in cache.stride()[:2])
        and (phase.key_cache.dtype, phase.key_cache.stride()) == (phase.value_cache.dtype, phase.value_cache.stride())
        and (norms is None or (not norms.of_values and norms.query.dtype == norms.key.dtype in _NORM_DTYPES))
        and (norms is None or (norms.query.is_contiguous() and norms.key.is_contiguous()))
        and (phase.angles is None or (phase.angles.dtype == torch.bfloat16 and phase.angles.is_contiguous()))
        and (rule.sinks is None or rule.sinks.dtype == torch.bfloat16)
        and rule.key_scale == rule.value_scale == 1.0
    )


def _takes_gemv(phase: GemvPhase) -> bool:
    weight, vectors = phase.weight, [vector for vector in (phase.source, phase.target) if vector is not None]
    if name_of(phase.source) == name_of(phase.target):
        return False
    if not all(vector.dtype == torch.bfloat16 and _is_aligned(vector) for vector in vectors):
        return False
    if phase.bias is not None and not (phase.bias.dtype == torch.bfloat16 and phase.bias.is_contiguous()):
        return False
    norm = None if phase.norm is None else phase.norm.weight
    if norm is not None and not (norm.dtype in _NORM_DTYPES and _is_plain(norm)):
        return False
    if phase.activation is not None and phase.activation not in ACTIVATIONS:
        return False
    if isinstance(weight, PackedW4):
        is_even = phase.activation is None or weight.outputs % (2 * TILE) == 0
        is_even &= weight.group & (weight.group - 1) == 0
        factors = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
        are_alike = len({(each.dtype, each.stride()) for each in factors}) == 1 and all(map(_is_plain, factors))
        halves = weight.scales.dtype in (torch.bfloat16, torch.float16) and weight.scales.shape[1] % TILE == 0
        return is_even and are_alike and halves and weight.inputs % 8 == 0 and _is_plain(weight.data)
    numbers = weight.numbers if isinstance(weight, ScaledRowsWeight) else weight
    if isinstance(weight, ScaledRowsWeight) and not (
        numbers.dtype in SMALL and weight.scale.dtype == torch.float32 and weight.scale.is_contiguous()
    ):
        return False
    if isinstance(weight, Tensor) and weight.dtype != torch.bfloat16:
        return False
    even = numbers.shape[1] * numbers.element_size() % UNIT == 0
    return even and _is_plain(numbers)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and _is_aligned(tensor)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNED == 0


class RowProgram:
    """Phases that `takes_phase` supports, as one kernel for one device. Compiles the kernel unless it is in the disk
    cache.

    A vector may be rewritten only by a phase that depends on all phases that read it before, since nothing else orders
    them. Raises ValueError if the phases cannot be combined, and CudaError if one launch of all phases does not give
    the same result for a padding row as one launch per phase.
    """

    def __init__(self, phases: Sequence[Phase], device: torch.device) -> None:
        self._phases = tuple(phases)  # keeps their tensors alive
        self._programs = num_processors(device)
        self._vectors = Vectors(phases, device)
        self._records, self._sources = lay_out(phases, self._vectors, self._programs)
        self._on_device = _upload(self._records, device), _upload(self._sources, device)
        attention = [phase for phase in phases if isinstance(phase, AttentionPhase)]
        queries, dim = queries_and_dim(attention)
        most_heads = max((phase.num_kv for phase in attention), default=0)
        room = max(self._programs, most_heads) * queries * (dim + 2)
        self._parts = torch.zeros(room, dtype=torch.int64, device=device)
        self._counters = torch.tensor([0, 1], dtype=torch.int32, device=device)
        self._sizes = Sizes(phases, queries, dim, shared_limit(device))
        constants = constants_of(phases, queries, dim) | {"SLOTS": self._sizes.slots}
        with torch.cuda.device(device):
            code = compile_source(_FILES, constants, torch.cuda.get_device_capability(device))
            self._kernel = CudaKernel(code, "run_program", self._sizes.total)
            self._check(device)

    @property
    def longest(self) -> int:
        """Context length in tokens up to which this is the faster way to run a step."""
        weights = (phase.weight for phase in self._phases if isinstance(phase, GemvPhase))
        return _LONGEST_NIBBLES if any(isinstance(weight, PackedW4) for weight in weights) else _LONGEST

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        """Run all phases in one launch. stream [1, hidden], bfloat16, is updated in place; positions [1] int64; rows
        [1] int32, negative: padding, nothing is written to the cache; tables [all rows, max blocks] int32: the main
        one, then those of windows."""
        self._launch(stream, positions, rows, tables, self._on_device, len(self._phases), len(self._sources))

    def _launch(
        self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor],
        records: tuple[Tensor, Tensor], num_phases: int, num_sources: int,
    ) -> None:  # fmt: skip
        given = RunRecord(
            stream=stream.data_ptr(), positions=positions.data_ptr(), rows=rows.data_ptr(),
            counters=self._counters.data_ptr(), parts=self._parts.data_ptr(),
            sources=records[1].data_ptr(), num_phases=num_phases, num_sources=num_sources,
            slot_bytes=self._sizes.slot, vector_bytes=self._sizes.vector, quarters_bytes=self._sizes.quarters,
        )  # fmt: skip
        for number, table in enumerate(tables[:MOST_TABLES]):
            given.tables[number] = table.data_ptr()
            given.table_strides[number], given.table_widths[number] = table.stride(0), table.shape[1]
        self._kernel.launch(
            self._programs, 32 * WARPS, (given, ctypes.c_uint64(records[0].data_ptr()))
        )  # fmt: skip

    def _check(self, device: torch.device) -> None:
        """Compare one launch of all phases with one launch per phase, for a padding row, which has no context. Raises
        CudaError unless the streams are bitwise equal and finite."""
        generator = torch.Generator(device).manual_seed(0)
        numbers = torch.randn(1, self._vectors.width, generator=generator, device=device).to(torch.bfloat16)
        at = torch.zeros(1, dtype=torch.int64, device=device)
        padding, table = torch.full((1,), -1, dtype=torch.int32, device=device), at.int().view(1, 1)
        together, apart = numbers.clone(), numbers.clone()
        self.run(together, at, padding, [table] * MOST_TABLES)
        number = 0
        for phase, record in zip(self._phases, self._records, strict=True):
            is_gemv, alone = isinstance(phase, GemvPhase), PhaseRecord.from_buffer_copy(record)
            alone.plain_source, alone.plain_before = name_of(phase.source), name_of(phase.target)
            alone.plain_target = name_of(phase.target)
            source = self._sources[number] if is_gemv else SourceRecord()
            given = _upload(alone, device), _upload(source, device)
            self._launch(apart, at, padding, [table] * MOST_TABLES, given, 1, int(is_gemv))
            torch.cuda.synchronize(device)  # the uploaded records are freed after this
            number += is_gemv
        if not torch.equal(together.view(torch.int16), apart.view(torch.int16)):
            raise CudaError("the one-row kernel failed its check: one launch differs from a launch per phase")
        if not bool(together.isfinite().all()):
            raise CudaError("the one-row kernel failed its check: its result is not finite")


def _upload(record: ctypes.Structure | ctypes.Array[Any], device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(record) or bytearray(8), dtype=torch.uint8).to(device)
