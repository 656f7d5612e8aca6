"""The inputs of a program run, and the C structures that the compiled kernels read. They mirror program.h,
recurrent.h, delta.h, mamba.h, selective.h, low_rank.h, shared_ranks.h and message_ring.h."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """The inputs of a program run besides its rows. Index tensors are int64 and contiguous, as for the functions of
    `ops`."""

    slots: Sequence[Tensor]  # cache slots of new tokens, for each block table: most layers use the first one
    tables: Sequence[Tensor]  # all of one layout
    spans: Tensor  # [n, 4], see `ops.paged_attention`
    wanted: Tensor | None  # indices of the rows that the program returns; None: all
    caches: Sequence[tuple[Tensor, Tensor]]  # keys and values [blocks, kv heads, block, dim] of each layer
    angles: Sequence[tuple[Tensor, Tensor]]  # cos, sin [rows, ..., rotated elements], in the order of `Program.angles`
    given: Any = None  # passed to Python operations
    beside: Tensor | None = None  # [rows, width]: the second input, if the program has one
    states: Sequence[Tensor] = ()  # [slots, elements] float32, of each recurrent layer
    segments: npt.NDArray[np.int64] | None = None  # [segments, 4] for recurrent layers, see kernels/recurrent.py
    adapters: tuple[Tensor, Tensor] | None = None  # LoRA slots of all rows and of the selected ones; negative: none


class CConvolution(Structure):
    _fields_ = (
        ("channels", c_int64), ("width", c_int64), ("tail", c_int64), ("gated", c_int64), ("weight", c_void_p),
        ("bias", c_void_p),
    )  # fmt: skip


class CDelta(Structure):
    _fields_ = (
        ("key_heads", c_int64), ("value_heads", c_int64), ("key_dim", c_int64), ("value_dim", c_int64),
        ("gates", c_int64), ("rate", c_void_p), ("bias", c_void_p), ("norm", c_void_p), ("eps", c_double),
    )  # fmt: skip


class CMamba(Structure):
    _fields_ = (
        ("groups", c_int64), ("heads", c_int64), ("key_dim", c_int64), ("value_dim", c_int64), ("normed", c_int64),
        ("norm_first", c_int64), ("rate", c_void_p), ("bias", c_void_p), ("skip", c_void_p), ("norm", c_void_p),
        ("eps", c_double),
    )  # fmt: skip


class CSelective(Structure):
    _fields_ = (
        ("channels", c_int64), ("state_size", c_int64), ("keys", c_int64), ("gates", c_int64), ("rate", c_void_p),
        ("bias", c_void_p), ("skip", c_void_p),
    )  # fmt: skip


class CLowRankLayer(Structure):
    _fields_ = (
        ("inputs", c_int64), ("parts", c_int64), ("num_spans", c_int64), ("tiled", c_int64), ("slot_bytes", c_int64),
        ("spans", c_void_p), ("ranks", c_void_p), ("halved", c_void_p), ("slots", c_void_p),
    )  # fmt: skip


class CRankPages(Structure):
    _fields_ = (
        ("base", c_void_p), ("slot_bytes", c_int64), ("size", c_int64), ("index", c_int64), ("seconds", c_double),
        ("missing", c_int64),
    )  # fmt: skip


class CMessageRing(Structure):
    _fields_ = (
        ("base", c_void_p), ("doorbell", c_void_p), ("readers", c_int64), ("slots", c_int64), ("slot_bytes", c_int64),
    )  # fmt: skip


class COperation(Structure):
    _fields_ = (
        ("kind", c_int64), ("x", c_int64), ("y", c_int64), ("out", c_int64), ("column", c_int64), ("groups", c_int64),
        ("size", c_int64), ("layer", c_int64), ("kv_heads", c_int64), ("block_size", c_int64), ("window", c_int64),
        ("weight", c_void_p), ("number", c_double), ("cap", c_double), ("wide", c_int64), ("table", c_int64),
        ("latent", c_int64), ("block_heads", c_int64), ("stored", c_int64), ("head_bytes", c_int64),
        ("slopes", c_void_p),
    )  # fmt: skip


class CAngles(Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("stride", c_int64), ("dim", c_int64))


class CRun(Structure):
    _fields_ = (
        ("rows", c_int64), ("num_wanted", c_int64), ("num_spans", c_int64), ("slots", c_void_p), ("tables", c_void_p),
        ("spans", c_void_p), ("wanted", c_void_p), ("buffers", c_void_p), ("widths", c_void_p), ("angles", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("states", c_void_p), ("state_stride", c_int64),
        ("segments", c_void_p), ("num_segments", c_int64), ("adapters", c_void_p), ("wanted_adapters", c_void_p),
    )  # fmt: skip
