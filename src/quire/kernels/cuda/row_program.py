"""Phases as one kernel: a program on every multiprocessor, which go through the phases together.

Between two phases all programs wait for one another. That costs about a microsecond, less than a launch, and memory is
read meanwhile: each warp copies the weights of its next rows into shared memory ahead of time, across phases. So a step
of one row takes little longer than reading its weights. See row_program.cu and the files it is made of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from quire.kernels.cuda.nvrtc import CudaKernel, compile_source, why_no_nvrtc
from quire.kernels.cuda.row_phases import AttentionPhase, Phase, ProductPhase, ScaledRowsWeight
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.launch import num_processors
from quire.kernels.triton.nibble_products import STEP, PackedNibbles

_FILES = ("row_common.cuh", "row_ring.cuh", "row_products.cuh", "row_attention.cuh", "row_program.cu")
_CAPABILITY = 9  # the major one of GPUs that the kernel was made for and tried on
_BF16, _FLOAT8, _INT8, _NIBBLES, _ATTENTION = range(5)
_SMALL = {torch.float8_e4m3fn: _FLOAT8, torch.int8: _INT8}
_WARPS, _COPYING, _TILE, _UNIT, _PIECE_STEPS = 8, 4, 16, 64, 4
_PIECE = 16 * 320  # bytes of a slot; scales and offsets of 4-bit weights may take more
_MOST_SLOTS, _FEWEST_SLOTS, _MOST_TABLES = 16, 2, 4
_STATIC_BYTES = 7168  # of shared memory, beside what a launch asks for
_DIMS, _MOST_QUERIES = (64, 128, 256), 8
_ALIGNED = 16
_STREAM = 1  # in place of an address
_MOST_LAYER_BYTES = 200 << 20  # of bfloat16 weights, up to which it was faster


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class _Phase(ctypes.Structure):
    """`Phase` of row_common.cuh."""

    _fields_ = (
        *_fields(ctypes.c_uint64, "weight", "scale", "offset", "bias", "norm", "source", "target"),
        *_fields(ctypes.c_uint64, "plain_source", "plain_before", "plain_target"),
        *_fields(ctypes.c_uint64, "keys", "values", "key_scales", "value_scales"),
        *_fields(ctypes.c_uint64, "angles", "sinks", "query_norm", "key_norm"),
        *_fields(ctypes.c_int64, "block_stride"),
        *_fields(ctypes.c_int32, "head_stride", "block_size", "kind", "outputs", "inputs", "row_bytes"),
        *_fields(ctypes.c_int32, "activation", "adds", "norm_is_wide", "steps"),
        *_fields(ctypes.c_int32, "group_shift", "factor_stride", "factor_is_half", "num_query"),
        *_fields(ctypes.c_int32, "num_kv", "turned", "table", "window"),
        *_fields(ctypes.c_int32, "shift", "source_phase", "before_phase", "unused"),
        *_fields(ctypes.c_float, "eps", "factor", "softcap", "value_scale"),
    )


class _Source(ctypes.Structure):
    """`Source` of row_ring.cuh."""

    _fields_ = (
        *_fields(ctypes.c_uint64, "weight", "scale", "offset"),
        *_fields(ctypes.c_int32, "outputs", "row_bytes", "steps", "factor_stride"),
        *_fields(ctypes.c_int16, "group_shift", "parts", "is_dense", "shift"),
    )


class _Run(ctypes.Structure):
    """`Run` of row_common.cuh."""

    _fields_ = (
        *_fields(ctypes.c_uint64, "stream", "positions", "rows"),
        ("tables", ctypes.c_uint64 * _MOST_TABLES),
        ("table_strides", ctypes.c_int32 * _MOST_TABLES),
        ("table_widths", ctypes.c_int32 * _MOST_TABLES),
        *_fields(ctypes.c_uint64, "counters", "parts", "sources"),
        *_fields(ctypes.c_int32, "num_phases", "num_sources", "slot_bytes", "vector_bytes", "sums_bytes"),
    )


@cache
def why_not_row_program(device: torch.device) -> str | None:
    """What keeps the kernel from running there; None: nothing."""
    if device.type != "cuda":
        return "it runs on CUDA devices"
    if torch.cuda.get_device_capability(device)[0] != _CAPABILITY:
        return "it is made for Hopper GPUs"
    return why_no_nvrtc()


def takes_phase(phase: Phase) -> bool:
    """Whether the kernel has this kind of phase."""
    return _takes_attention(phase) if isinstance(phase, AttentionPhase) else _takes_product(phase)


def why_not_faster(phases: Sequence[Phase]) -> str | None:
    """Why phases run faster kernel by kernel, as measured on an H200; None: they do not. Layers of many bytes leave
    little to gain, and numbers of 8 bits are not converted fast enough."""
    weights = [phase.weight for phase in phases if isinstance(phase, ProductPhase)]
    if any(isinstance(weight, ScaledRowsWeight) for weight in weights):
        return "weights of 8 bits are multiplied faster by other kernels"
    layers = sum(isinstance(phase, AttentionPhase) for phase in phases)
    plain = sum(weight.numel() * weight.element_size() for weight in weights if isinstance(weight, Tensor))
    if plain > _MOST_LAYER_BYTES * max(layers, 1):
        return f"layers of {plain // max(layers, 1) >> 20} MiB of weights are read as fast by other kernels"
    return None


def _takes_attention(phase: AttentionPhase) -> bool:
    caches, rule = (phase.key_cache, phase.value_cache), phase.rule
    is_plain = phase.key_cache.dtype == torch.bfloat16 and phase.scales is None
    is_scaled = phase.key_cache.dtype in _SMALL and phase.scales is not None
    return (
        phase.dim in _DIMS
        and phase.num_query % phase.num_kv == 0
        and phase.num_query // phase.num_kv <= _MOST_QUERIES
        and phase.table < _MOST_TABLES
        and (is_plain or is_scaled)
        and all(_is_aligned(cache) and cache.stride(3) == 1 and cache.stride(2) == phase.dim for cache in caches)
        and all(stride % 8 == 0 for cache in caches for stride in cache.stride()[:2])
        and (phase.angles is None or (phase.angles.dtype == torch.bfloat16 and phase.angles.is_contiguous()))
        and (rule.sinks is None or rule.sinks.dtype == torch.bfloat16)
        and rule.key_scale == 1.0
    )


def _takes_product(phase: ProductPhase) -> bool:
    weight, vectors = phase.weight, [vector for vector in (phase.source, phase.target) if vector is not None]
    if _name(phase.source) == _name(phase.target):
        return False
    if not all(vector.dtype == torch.bfloat16 and _is_aligned(vector) for vector in vectors):
        return False
    if phase.bias is not None and phase.bias.dtype != torch.bfloat16:
        return False
    if phase.norm is not None and phase.norm.weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if phase.activation is not None and phase.activation not in ACTIVATIONS:
        return False
    if isinstance(weight, PackedNibbles):
        is_even = phase.activation is None or weight.outputs % (2 * _TILE) == 0
        is_even &= weight.group & (weight.group - 1) == 0
        halves = weight.scales.dtype in (torch.bfloat16, torch.float16)
        return is_even and halves and weight.inputs % 8 == 0 and weight.scales.shape[1] % _TILE == 0
    numbers = weight.numbers if isinstance(weight, ScaledRowsWeight) else weight
    if isinstance(weight, ScaledRowsWeight) and (numbers.dtype not in _SMALL or weight.scale.dtype != torch.float32):
        return False
    if isinstance(weight, Tensor) and weight.dtype != torch.bfloat16:
        return False
    even = numbers.shape[1] * numbers.element_size() % _UNIT == 0
    return even and numbers.is_contiguous() and _is_aligned(numbers)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNED == 0


class RowProgram:
    """Phases, all of which `takes_phase` takes, as one kernel for one device. Compiles it unless it is kept on disk.

    A vector may be written again only by a phase that depends on all phases that read it before: nothing else holds it
    back."""

    def __init__(self, phases: Sequence[Phase], device: torch.device) -> None:
        self._phases = tuple(phases)  # keeps their tensors alive
        self._programs = num_processors(device)
        self._vectors = _Vectors(phases, device)
        records, sources = _lay_out(phases, self._vectors, self._programs)
        self._records = torch.frombuffer(bytearray(records), dtype=torch.uint8).to(device)
        self._sources = torch.frombuffer(bytearray(sources), dtype=torch.uint8).to(device)
        self._num_sources = len(sources)
        attention = [phase for phase in phases if isinstance(phase, AttentionPhase)]
        queries, dim = _queries_and_dim(attention)
        most_heads = max((phase.num_kv for phase in attention), default=0)
        room = max(self._programs, most_heads) * queries * (dim + 2)
        self._parts = torch.zeros(room, dtype=torch.int64, device=device)
        self._counters = torch.tensor([0, 1], dtype=torch.int32, device=device)
        self._sizes = _Sizes(phases, queries, dim, _shared_limit(device))
        constants = _constants(phases, queries, dim) | {"SLOTS": self._sizes.slots}
        with torch.cuda.device(device):
            code = compile_source(_FILES, constants, torch.cuda.get_device_capability(device))
            self._kernel = CudaKernel(code, "run_program", self._sizes.total)

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        """stream [1, hidden], bfloat16, is changed in place; positions [1] int64; rows [1] int32, below 0: padding,
        nothing is written to the cache; tables [all rows, max blocks] int32: the first, then those of windows. One
        launch."""
        given = _Run(
            stream=stream.data_ptr(), positions=positions.data_ptr(), rows=rows.data_ptr(),
            counters=self._counters.data_ptr(), parts=self._parts.data_ptr(), num_phases=len(self._phases),
            slot_bytes=self._sizes.slot, vector_bytes=self._sizes.vector,
            sums_bytes=self._sizes.sums, sources=self._sources.data_ptr(), num_sources=self._num_sources,
        )  # fmt: skip
        for number, table in enumerate(tables[:_MOST_TABLES]):
            given.tables[number] = table.data_ptr()
            given.table_strides[number], given.table_widths[number] = table.stride(0), table.shape[1]
        threads = 32 * (_WARPS + _COPYING)
        self._kernel.launch(self._programs, threads, (given, ctypes.c_uint64(self._records.data_ptr())))


class _Vectors:
    """Where phases hand on vectors: words of a number and a mark, see row_common.cuh. None is the stream."""

    def __init__(self, phases: Sequence[Phase], device: torch.device) -> None:
        sizes: dict[int, int] = {}
        for phase in phases:
            for vector in (phase.source, phase.target):
                size = _count_outputs(phase) if vector is phase.target else _count_inputs(phase)
                sizes[_name(vector)] = max(size, sizes.get(_name(vector), 0))
        self._words = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        self._writers: dict[int, int] = {}  # the last phase that wrote a vector
        last = {_name(phase.target): number for number, phase in enumerate(phases)}
        self._last = set(last.items())

    def describe(self, record: _Phase, phase: Phase, number: int) -> None:
        """Say where a phase reads and writes; in the order of the phases."""
        source, target = _name(phase.source), _name(phase.target)
        record.source, record.target = (self._words[name].data_ptr() for name in (source, target))
        record.source_phase, record.before_phase = (self._writers.get(name, -1) for name in (source, target))
        record.plain_source = source if source not in self._writers else 0
        record.plain_before = target if target not in self._writers else 0
        record.plain_target = target if (target, number) in self._last else 0
        self._writers[target] = number


def _name(vector: Tensor | None) -> int:
    return _STREAM if vector is None else vector.data_ptr()


class _Sizes:
    """Bytes of shared memory: what a slot of a warp's ring takes, how many slots it has, the phase's vector, the sums
    behind it, and all together."""

    def __init__(self, phases: Sequence[Phase], queries: int, dim: int, limit: int) -> None:
        products = [phase for phase in phases if isinstance(phase, ProductPhase)]
        nibbles = [phase.weight for phase in products if isinstance(phase.weight, PackedNibbles)]
        inputs = max(-(-_inputs_of(phase) // STEP) * STEP for phase in products)
        attention = 4 * ((queries + 2) * dim + _WARPS * queries * (dim + 2))
        self.vector = -(-max(2 * inputs, attention) // 128) * 128
        self.sums = 4 * inputs // 32 if nibbles else 0
        sources = len(products) * ctypes.sizeof(_Source)
        self.slot = max((_steps_bytes(weight) for weight in nibbles), default=0)
        if len(nibbles) < len(products):
            self.slot = max(self.slot, _PIECE)
        room = limit - self.vector - self.sums - sources
        self.slots = min(_MOST_SLOTS, room // (_WARPS * self.slot))
        if self.slots < _FEWEST_SLOTS:
            raise ValueError(f"vectors of {inputs} numbers leave no room for weights in shared memory")
        self.total = _WARPS * self.slots * self.slot + self.vector + self.sums + sources


def _steps_bytes(weight: PackedNibbles) -> int:
    """Of a slot's steps with their scales and offsets, rounded up to whole lines."""
    groups = -(-_PIECE_STEPS * STEP // weight.group) + (1 if weight.group > STEP else 0)
    lines = groups * (1 if weight.offsets is None else 2)
    return _PIECE_STEPS * _TILE * STEP // 2 + -(-lines * _TILE * 2 // 128) * 128


def _shared_limit(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - _STATIC_BYTES


def _queries_and_dim(phases: Sequence[AttentionPhase]) -> tuple[int, int]:
    """Queries that share a key/value head, and numbers of a head: the same in all layers."""
    kinds = {(phase.num_query // phase.num_kv, phase.dim, phase.key_cache.dtype) for phase in phases}
    if len(kinds) > 1:
        raise ValueError(f"layers have different heads: {sorted(map(str, kinds))}")
    return (1, _DIMS[0]) if not phases else next(iter(kinds))[:2]


def _constants(phases: Sequence[Phase], queries: int, dim: int) -> dict[str, int]:
    caches = {phase.key_cache.dtype for phase in phases if isinstance(phase, AttentionPhase)}
    kinds = {record.kind for record in map(_record_of, phases)}
    return {
        "HEAD_DIM": dim, "QUERIES": queries, "CACHE_KIND": _SMALL.get(next(iter(caches), torch.bfloat16), _BF16),
        "HAS_DENSE": int(_BF16 in kinds), "HAS_FLOAT8": int(_FLOAT8 in kinds), "HAS_INT8": int(_INT8 in kinds),
        "HAS_NIBBLES": int(_NIBBLES in kinds), "QUARTERS": _quarters(phases),
        "FACTORS_ARE_HALVES": int(any(record.factor_is_half for record in map(_record_of, phases))),
    }  # fmt: skip


def _quarters(phases: Sequence[Phase]) -> int:
    """Of a step of 4-bit weights, that share a scale: the same for all of them."""
    weights = [phase.weight for phase in phases if isinstance(phase, ProductPhase)]
    found = {min(4, weight.group // 32) for weight in weights if isinstance(weight, PackedNibbles)}
    if len(found) > 1:
        raise ValueError("weights of 4 bits have groups of different sizes")
    return next(iter(found), 4)


def _count_inputs(phase: Phase) -> int:
    """Numbers of a phase's source."""
    if isinstance(phase, AttentionPhase):
        return (phase.num_query + 2 * phase.num_kv) * phase.dim
    return _inputs_of(phase)


def _count_outputs(phase: Phase) -> int:
    """Numbers of a phase's target."""
    if isinstance(phase, AttentionPhase):
        return phase.num_query * phase.dim
    return int(_product_record(phase).outputs)


def _inputs_of(phase: ProductPhase) -> int:
    weight = phase.weight
    if isinstance(weight, PackedNibbles):
        return weight.inputs
    return int((weight.numbers if isinstance(weight, ScaledRowsWeight) else weight).shape[1])


def _lay_out(
    phases: Sequence[Phase], vectors: _Vectors, programs: int
) -> tuple[ctypes.Array[_Phase], ctypes.Array[_Source]]:
    """The records of all phases, and of what products read. The tiles of a product begin where those of the one before
    ended, so that all programs get as many."""
    records, sources, tiles = [], [], 0
    for number, phase in enumerate(phases):
        record = _record_of(phase)
        vectors.describe(record, phase, number)
        records.append(record)
        if record.kind == _ATTENTION:
            continue
        record.shift = -tiles % programs
        source = _Source(
            weight=record.weight, scale=record.scale, offset=record.offset, outputs=record.outputs,
            row_bytes=record.row_bytes, steps=record.steps, factor_stride=record.factor_stride,
            group_shift=record.group_shift, parts=1 if record.activation < 0 else 2,
            is_dense=int(record.kind != _NIBBLES), shift=record.shift,
        )  # fmt: skip
        sources.append(source)
        tiles += -(-record.outputs // _TILE)
    return (_Phase * len(records))(*records), (_Source * len(sources))(*sources)


def _record_of(phase: Phase) -> _Phase:
    return _attention_record(phase) if isinstance(phase, AttentionPhase) else _product_record(phase)


def _product_record(phase: ProductPhase) -> _Phase:
    weight, norm = phase.weight, phase.norm
    record = _Phase(
        bias=_address(phase.bias),
        norm=_address(None if norm is None else norm.weight), eps=0.0 if norm is None else norm.eps,
        norm_is_wide=int(norm is not None and norm.weight.dtype == torch.float32), adds=int(phase.adds),
        activation=-1 if phase.activation is None else ACTIVATIONS[phase.activation], inputs=_inputs_of(phase),
    )  # fmt: skip
    if isinstance(weight, PackedNibbles):
        record.kind, outputs, record.steps = _NIBBLES, weight.outputs, weight.data.shape[1]
        record.weight, record.scale = _address(weight.data), _address(weight.scales)
        record.offset, record.factor_stride = _address(weight.offsets), weight.scales.stride(0)
        record.factor_is_half = int(weight.scales.dtype == torch.float16)
        record.group_shift = max(weight.group // STEP, 1).bit_length() - 1
    else:
        numbers = weight.numbers if isinstance(weight, ScaledRowsWeight) else weight
        record.kind, outputs = _SMALL.get(numbers.dtype, _BF16), numbers.shape[0]
        record.weight, record.row_bytes = _address(numbers), numbers.shape[1] * numbers.element_size()
        record.scale = _address(weight.scale if isinstance(weight, ScaledRowsWeight) else None)
    record.outputs = outputs if phase.activation is None else outputs // 2
    return record


def _attention_record(phase: AttentionPhase) -> _Phase:
    norms, rule, cache = phase.norms, phase.rule, phase.key_cache
    scales = (None, None) if phase.scales is None else phase.scales
    return _Phase(
        kind=_ATTENTION, activation=-1,
        keys=_address(cache), values=_address(phase.value_cache),
        key_scales=_address(scales[0]), value_scales=_address(scales[1]),
        angles=_address(phase.angles), turned=0 if phase.angles is None else phase.angles.shape[1],
        sinks=_address(rule.sinks), query_norm=_address(norms and norms.query), key_norm=_address(norms and norms.key),
        norm_is_wide=int(norms is not None and norms.query.dtype == torch.float32), eps=norms.eps if norms else 0.0,
        block_stride=cache.stride(0), head_stride=cache.stride(1), block_size=cache.shape[2],
        num_query=phase.num_query, num_kv=phase.num_kv, table=phase.table, window=rule.window or 0,
        factor=rule.factor, softcap=(rule.softcap or 0.0) * _LOG2_E, value_scale=rule.value_scale,
    )  # fmt: skip


_LOG2_E = 1.4426950408889634  # scores are exponents of 2, and so is what caps them


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
