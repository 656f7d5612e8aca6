"""What programs hand to the compiled kernels. The structures mirror program.h and delta.h."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p


class CDelta(Structure):
    _fields_ = (
        ("key_heads", c_int64), ("value_heads", c_int64), ("key_dim", c_int64), ("value_dim", c_int64),
        ("width", c_int64), ("gates", c_int64), ("convolution", c_void_p), ("rate", c_void_p), ("bias", c_void_p),
        ("norm", c_void_p), ("eps", c_double),
    )  # fmt: skip


class COperation(Structure):
    _fields_ = (
        ("kind", c_int64), ("x", c_int64), ("y", c_int64), ("out", c_int64), ("column", c_int64), ("groups", c_int64),
        ("size", c_int64), ("layer", c_int64), ("kv_heads", c_int64), ("block_size", c_int64), ("window", c_int64),
        ("weight", c_void_p), ("number", c_double), ("cap", c_double), ("wide", c_int64), ("table", c_int64),
        ("latent", c_int64), ("block_heads", c_int64), ("stored", c_int64), ("head_bytes", c_int64),
    )  # fmt: skip


class CAngles(Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("stride", c_int64), ("dim", c_int64))


class CRun(Structure):
    _fields_ = (
        ("rows", c_int64), ("num_wanted", c_int64), ("num_spans", c_int64), ("slots", c_void_p), ("tables", c_void_p),
        ("spans", c_void_p), ("wanted", c_void_p), ("buffers", c_void_p), ("widths", c_void_p), ("angles", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("states", c_void_p), ("state_stride", c_int64),
        ("segments", c_void_p), ("num_segments", c_int64),
    )  # fmt: skip
