"""Triton's interpreter, for machines without a GPU. Import before any kernel is: how it runs is decided then."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one number, which numpy no longer turns into an int unasked."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _run_grid = interpreter.GridExecutor.__call__

    def _run_grid_in_silence(self: Any, *arguments: Any, **named: Any) -> None:
        """A GPU says nothing of infinities and NaN, and rows of padding hold whatever their memory held before."""
        with np.errstate(all="ignore"):
            _run_grid(self, *arguments, **named)

    interpreter._patch_lang_tensor = _patch_tensor_and_index
    interpreter.GridExecutor.__call__ = _run_grid_in_silence
