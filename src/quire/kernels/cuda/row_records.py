"""Memory layout of phases for the kernel that runs them: records, vectors, and sizes of shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from quire.kernels.cuda.row_phases import AttentionPhase, GemvPhase, Phase, ScaledRowsWeight, count_outputs
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.gemm_w4 import STEP, PackedW4
from quire.kernels.triton.launch import shared_memory

BF16, FLOAT8, INT8, NIBBLES, ATTENTION = range(5)
SMALL = {torch.float8_e4m3fn: FLOAT8, torch.int8: INT8}
WARPS, TILE, UNIT, PIECE_UNITS, PIECE_STEPS = 8, 16, 64, 4, 4
MOST_TABLES = 4
DIMS, MOST_QUERIES = (64, 128, 256), 8
STREAM = 1  # in place of an address: the stream
_PIECE = PIECE_UNITS * TILE * UNIT  # bytes of a slot; 4-bit weights with their scales and offsets take more
_MOST_SLOTS, _FEWEST_SLOTS = 16, 2
_STATIC_BYTES = 6656  # static shared memory, besides the dynamic
_LOG2_E = 1.4426950408889634  # scores are exponents of 2, so the softcap is scaled too


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class PhaseRecord(ctypes.Structure):
    """Mirrors `Phase` of row_common.cuh."""

    _fields_ = (
        *_fields(ctypes.c_uint64, "weight", "scale", "offset", "bias", "norm", "source", "target"),
        *_fields(ctypes.c_uint64, "plain_source", "plain_before", "plain_target"),
        *_fields(ctypes.c_uint64, "keys", "values", "key_scales", "value_scales"),
        *_fields(ctypes.c_uint64, "angles", "sinks", "query_norm", "key_norm"),
        *_fields(ctypes.c_int64, "block_stride"),
        *_fields(ctypes.c_int32, "head_stride", "block_size", "kind", "outputs", "inputs", "row_bytes"),
        *_fields(ctypes.c_int32, "activation", "adds", "norm_is_wide", "steps"),
        *_fields(ctypes.c_int32, "group_shift", "factor_stride", "num_query"),
        *_fields(ctypes.c_int32, "num_kv", "rotated", "table", "window"),
        *_fields(ctypes.c_int32, "shift", "team_shift", "parts", "source_phase", "before_phase"),
        *_fields(ctypes.c_float, "eps", "factor", "softcap", "value_scale"),
    )


class SourceRecord(ctypes.Structure):
    """Mirrors `Source` of row_ring.cuh."""

    _fields_ = (
        *_fields(ctypes.c_uint64, "weight", "scale", "offset"),
        *_fields(ctypes.c_int32, "outputs", "stride", "factor_stride", "shift"),
        *_fields(ctypes.c_int16, "group_shift", "parts", "is_dense", "team_shift"),
    )


class RunRecord(ctypes.Structure):
    """Mirrors `Run` of row_common.cuh."""

    _fields_ = (
        *_fields(ctypes.c_uint64, "stream", "positions", "rows"),
        ("tables", ctypes.c_uint64 * MOST_TABLES),
        ("table_strides", ctypes.c_int32 * MOST_TABLES),
        ("table_widths", ctypes.c_int32 * MOST_TABLES),
        *_fields(ctypes.c_uint64, "counters", "parts", "sources"),
        *_fields(ctypes.c_int32, "num_phases", "num_sources", "slot_bytes", "vector_bytes", "quarters_bytes"),
    )


class Vectors:
    """The vectors that phases pass on: words of a value and a mark, see row_common.cuh. None is the stream."""

    def __init__(self, phases: Sequence[Phase], device: torch.device) -> None:
        sizes: dict[int, int] = {}
        for phase in phases:
            for vector in (phase.source, phase.target):
                size = _count_outputs(phase) if vector is phase.target else _count_inputs(phase)
                sizes[name_of(vector)] = max(size, sizes.get(name_of(vector), 0))
        self._words = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        self.width = max(sizes.get(STREAM, 0), 8)  # of the stream
        self._writers: dict[int, int] = {}  # the last phase that wrote each vector
        last = {name_of(phase.target): number for number, phase in enumerate(phases)}
        self._last = set(last.items())

    def describe(self, record: PhaseRecord, phase: Phase, number: int) -> None:
        """Fill in the addresses that a phase reads and writes. Must be called in the order of the phases."""
        source, target = name_of(phase.source), name_of(phase.target)
        record.source, record.target = (self._words[name].data_ptr() for name in (source, target))
        record.source_phase, record.before_phase = (self._writers.get(name, -1) for name in (source, target))
        record.plain_source = source if source not in self._writers else 0
        record.plain_before = target if target not in self._writers else 0
        record.plain_target = target if (target, number) in self._last else 0
        self._writers[target] = number


def name_of(vector: Tensor | None) -> int:
    return STREAM if vector is None else vector.data_ptr()


class Sizes:
    """Sizes in bytes of shared memory: a slot of a warp's ring, the phase's vector, the input scales behind it, and the
    total; and the number of slots. Raises ValueError if there is too little for two slots."""

    def __init__(self, phases: Sequence[Phase], queries: int, dim: int, limit: int) -> None:
        gemvs = [phase for phase in phases if isinstance(phase, GemvPhase)]
        nibbles = [phase.weight for phase in gemvs if isinstance(phase.weight, PackedW4)]
        inputs = max((-(-_inputs_of(phase) // STEP) * STEP for phase in gemvs), default=0)
        attention = 4 * ((queries + 2) * dim + WARPS * queries * (dim + 2))
        self.vector = -(-max(2 * inputs, attention) // 128) * 128
        self.quarters = 8 * inputs // 32 if nibbles else 0
        sources = len(gemvs) * ctypes.sizeof(SourceRecord)
        self.slot = max((_steps_bytes(weight) for weight in nibbles), default=0)
        if not nibbles or len(nibbles) < len(gemvs):
            self.slot = max(self.slot, _PIECE)
        room = limit - self.vector - self.quarters - sources
        self.slots = min(_MOST_SLOTS, room // (WARPS * self.slot))
        if self.slots < _FEWEST_SLOTS:
            raise ValueError(f"shared memory is too small: vectors of {inputs} elements leave no room for weights")
        self.total = WARPS * self.slots * self.slot + self.vector + self.quarters + sources


def _steps_bytes(weight: PackedW4) -> int:
    """Return the bytes of a slot's steps with their scales and offsets, rounded up to whole 128-byte lines."""
    lines = PIECE_STEPS * STEP // min(weight.group, STEP) * (1 if weight.offsets is None else 2)
    return PIECE_STEPS * TILE * STEP // 2 + -(-lines * TILE * 2 // 128) * 128


def shared_limit(device: torch.device) -> int:
    """Return the bytes of dynamic shared memory that a launch may request."""
    return shared_memory(device) - _STATIC_BYTES


def queries_and_dim(phases: Sequence[AttentionPhase]) -> tuple[int, int]:
    """Return the query heads per kv head, and the head size, which must be the same in all layers. Raises
    ValueError."""
    kinds = {(phase.num_query // phase.num_kv, phase.dim, phase.key_cache.dtype) for phase in phases}
    if len(kinds) > 1:
        raise ValueError(f"layers have different heads: {sorted(map(str, kinds))}")
    return (1, DIMS[0]) if not phases else next(iter(kinds))[:2]


def constants_of(phases: Sequence[Phase], queries: int, dim: int) -> dict[str, int]:
    """Return the compile-time constants of the kernel for these phases."""
    caches = {phase.key_cache.dtype for phase in phases if isinstance(phase, AttentionPhase)}
    kinds = {record.kind for record in map(_record_of, phases)}
    return {
        "HEAD_DIM": dim, "QUERIES": queries, "CACHE_KIND": SMALL.get(next(iter(caches), torch.bfloat16), BF16),
        "HAS_DENSE": int(BF16 in kinds), "HAS_FLOAT8": int(FLOAT8 in kinds), "HAS_INT8": int(INT8 in kinds),
        "HAS_NIBBLES": int(NIBBLES in kinds), **_nibble_constants(phases),
    }  # fmt: skip


def _nibble_constants(phases: Sequence[Phase]) -> dict[str, int]:
    """Return how many quarters of a step of 4-bit weights share a scale, and whether scales are float16; must be the
    same for all weights. Raises ValueError."""
    weights = [phase.weight for phase in phases if isinstance(phase, GemvPhase)]
    nibbles = [weight for weight in weights if isinstance(weight, PackedW4)]
    found = {(min(4, weight.group // 32), weight.scales.dtype == torch.float16) for weight in nibbles}
    if len(found) > 1:
        raise ValueError("4-bit weights have groups of different sizes, or scales of different dtypes")
    quarters, are_halves = next(iter(found), (4, False))
    return {"QUARTERS": quarters, "FACTORS_ARE_HALVES": int(are_halves)}


def _count_inputs(phase: Phase) -> int:
    """Return the number of elements of a phase's source."""
    if isinstance(phase, AttentionPhase):
        return (phase.num_query + 2 * phase.num_kv) * phase.dim
    return _inputs_of(phase)


def _count_outputs(phase: Phase) -> int:
    """Return the number of elements of a phase's target."""
    if isinstance(phase, AttentionPhase):
        return phase.num_query * phase.dim
    return count_outputs(phase.weight) // (1 if phase.activation is None else 2)


def _inputs_of(phase: GemvPhase) -> int:
    weight = phase.weight
    if isinstance(weight, PackedW4):
        return weight.inputs
    return int((weight.numbers if isinstance(weight, ScaledRowsWeight) else weight).shape[1])


def lay_out(
    phases: Sequence[Phase], vectors: Vectors, programs: int
) -> tuple[ctypes.Array[PhaseRecord], ctypes.Array[SourceRecord]]:
    """Return the records of all phases, and of what gemv phases read. The tiles of a gemv continue at the block where
    those of the previous one ended, so that all blocks get equally many."""
    records, sources, tiles = [], [], 0
    for number, phase in enumerate(phases):
        record = _record_of(phase)
        vectors.describe(record, phase, number)
        records.append(record)
        if record.kind == ATTENTION:
            continue
        record.shift, record.team_shift = -tiles % programs, _team_shift(record, programs)
        is_dense = record.kind != NIBBLES
        source = SourceRecord(
            weight=record.weight, scale=record.scale, offset=record.offset, outputs=record.outputs,
            stride=record.row_bytes if is_dense else record.steps, factor_stride=record.factor_stride,
            shift=record.shift, group_shift=record.group_shift, parts=record.parts, is_dense=int(is_dense),
            team_shift=record.team_shift,
        )  # fmt: skip
        sources.append(source)
        tiles += -(-record.outputs // TILE)
    return (PhaseRecord * len(records))(*records), (SourceRecord * len(sources))(*sources)


def _team_shift(record: PhaseRecord, programs: int) -> int:
    """Return log2 of the number of warps that multiply a tile together: the fastest for a block to finish its tiles, if
    a tile has an overhead of 1.5 pieces."""
    tiles = ceil(record.outputs / (TILE * programs))  # per block
    units, each = (record.steps, PIECE_STEPS) if record.kind == NIBBLES else (record.row_bytes // UNIT, PIECE_UNITS)

    def cost(shift: int) -> float:
        pieces: int = ceil(units / (each << shift)) * record.parts
        turns: int = ceil(tiles / (WARPS >> shift))
        return turns * (pieces + 1.5)

    return min((3, 2, 1), key=cost)


def _record_of(phase: Phase) -> PhaseRecord:
    return _attention_record(phase) if isinstance(phase, AttentionPhase) else _gemv_record(phase)


def _gemv_record(phase: GemvPhase) -> PhaseRecord:
    weight, norm = phase.weight, phase.norm
    record = PhaseRecord(
        bias=_address(phase.bias),
        norm=_address(None if norm is None else norm.weight), eps=0.0 if norm is None else norm.eps,
        norm_is_wide=int(norm is not None and norm.weight.dtype == torch.float32), adds=int(phase.adds),
        activation=-1 if phase.activation is None else ACTIVATIONS[phase.activation], inputs=_inputs_of(phase),
        outputs=_count_outputs(phase), parts=1 if phase.activation is None else 2,
    )  # fmt: skip
    if isinstance(weight, PackedW4):
        record.kind, record.steps = NIBBLES, weight.data.shape[1]
        record.weight, record.scale = _address(weight.data), _address(weight.scales)
        record.offset, record.factor_stride = _address(weight.offsets), weight.scales.stride(0)
        record.group_shift = max(weight.group // STEP, 1).bit_length() - 1
    else:
        numbers = weight.numbers if isinstance(weight, ScaledRowsWeight) else weight
        record.kind = SMALL.get(numbers.dtype, BF16)
        record.weight, record.row_bytes = _address(numbers), numbers.shape[1] * numbers.element_size()
        record.scale = _address(weight.scale if isinstance(weight, ScaledRowsWeight) else None)
    return record


def _attention_record(phase: AttentionPhase) -> PhaseRecord:
    norms, rule, cache = phase.norms, phase.rule, phase.key_cache
    scales = (None, None) if phase.scales is None else phase.scales
    return PhaseRecord(
        kind=ATTENTION, activation=-1,
        keys=_address(cache), values=_address(phase.value_cache),
        key_scales=_address(scales[0]), value_scales=_address(scales[1]),
        angles=_address(phase.angles), rotated=0 if phase.angles is None else phase.angles.shape[1],
        sinks=_address(rule.sinks), query_norm=_address(norms.query if norms else None),
        key_norm=_address(norms.key if norms else None),
        norm_is_wide=int(norms is not None and norms.query.dtype == torch.float32), eps=norms.eps if norms else 0.0,
        block_stride=cache.stride(0), head_stride=cache.stride(1), block_size=cache.shape[2],
        num_query=phase.num_query, num_kv=phase.num_kv, table=phase.table, window=rule.window or 0,
        factor=rule.factor, softcap=(rule.softcap or 0.0) * _LOG2_E, value_scale=rule.value_scale,
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
