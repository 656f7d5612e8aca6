"""Where kernel tests run and in which precisions, and the one thing Triton's interpreter must be helped with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from compile_only import COMPILE_ONLY

ON_GPU = torch.cuda.is_available() and not COMPILE_ONLY
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU or COMPILE_ONLY else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

_convert_float = interpreter._convert_float


def _convert_float_by_torch(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """float32 or float16 to float8: the interpreter's own rounding loses the carry into the exponent."""
    if target.name == "fp8e4nv" and source.name in ("fp32", "fp16"):
        small = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
        return small.view(torch.uint8).numpy()
    return _convert_float(data, source, target, rounding)


if not ON_GPU:
    interpreter._convert_float = _convert_float_by_torch


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the test device, the same for the same seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)
