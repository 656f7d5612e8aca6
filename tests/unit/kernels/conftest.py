"""Where there is no GPU, Triton kernels run in the interpreter."""

from __future__ import annotations

import interpreter  # noqa: F401
