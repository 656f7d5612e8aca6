"""Triton's interpreter, for machines without a GPU. Import before any kernel is: how it runs is decided then.

The interpreter is mended in three places, and spared work that no result depends on: it is what most of the time of the
tests on a machine without a GPU goes to.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from functools import cache
from typing import Any

import numpy as np
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _mend(interpreter: Any) -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one number, which numpy no longer turns into an int unasked."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    run_grid, turn = interpreter.GridExecutor.__call__, threading.RLock()

    def run_grid_in_silence(self: Any, *arguments: Any, **named: Any) -> None:
        """A GPU says nothing of infinities and NaN, and rows of padding hold whatever their memory held before. The
        interpreter's state is one for all threads, so that ranks that are threads take turns."""
        with turn, np.errstate(all="ignore"):
            run_grid(self, *arguments, **named)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.GridExecutor.__call__ = run_grid_in_silence


def _spare(interpreter: Any, tl: Any) -> None:
    patch_language = interpreter._patch_lang

    class Everywhere:
        """Stands for a kernel that sees both modules of the language."""

        __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012

    @cache
    def patch_once() -> Any:
        patch_language(Everywhere)
        return interpreter._LangPatchScope()  # holds no change, so that nothing is restored

    def patch_for_good(kernel: Any) -> Any:
        """The interpreter goes through the whole language at each call of each function, and restores a part of it."""
        return patch_once()

    def check_no_overflow(*_: Any) -> None:
        """Half a dozen operations for each sum of integers, whose outcome is asserted in Triton's debug mode alone."""

    of_type = interpreter._get_np_dtype
    of_scalar = cache(of_type)

    def numpy_type(tl_type: Any) -> Any:
        """A table of all types is made at each call."""
        return of_scalar(tl_type.scalar) if not isinstance(tl_type.scalar, tl.pointer_type) else of_type(tl_type)

    def make_tuple(self: Any, values: Any, type: Any = None) -> None:  # noqa: A002
        """The type of a tuple, such as each tensor's shape, is asked for by the compiler alone."""
        self.values = list(values)
        self.__dict__["given_type"] = type

    def type_of_tuple(self: Any) -> Any:
        given = self.__dict__["given_type"]
        if given is None:
            return tl.core._type_for_tuple_values(self.values)
        return given if isinstance(given, tl.core.tuple_type) else tl.core.tuple_type(given)

    tl.core.tuple.__init__ = make_tuple
    tl.core.tuple.type = property(type_of_tuple, lambda self, value: self.__dict__.update(given_type=value))
    interpreter._patch_lang = patch_for_good
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = check_no_overflow
    interpreter._get_np_dtype = numpy_type


if HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language
    from triton.runtime import interpreter

    _mend(interpreter)
    _spare(interpreter, triton.language)
