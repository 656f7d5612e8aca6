"""Names in Gluon that differ between versions of Triton."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # since Triton 3.7
