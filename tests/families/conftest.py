"""Where there is no GPU, the runtime's Triton path runs in the interpreter."""

from __future__ import annotations

import interpreter  # noqa: F401
