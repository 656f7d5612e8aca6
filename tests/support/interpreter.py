"""Triton's interpreter, for machines without a GPU. Import before any kernel is: how it runs is decided then.

The interpreter is mended in three places, and spared work that no result depends on: it is what most of the time of the
tests on a machine without a GPU goes to.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch

from compile_only import COMPILE_ONLY, compilations

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
        with turn, np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)  # not one of numpy's errors
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
        tl.dtype.to_ir = cache(tl.dtype.to_ir)
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


def _spare_types(core: Any) -> None:
    """The type of each value is made and compared anew at each operation: most of an operation's time."""
    unwrap, are_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {int, float, bool, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    shapes: dict[tuple[int, ...], tuple[Any, int, Any, Any]] = {}

    def unwrap_soon(value: Any) -> Any:
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in plain else unwrap(value)

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        if sizes not in shapes:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            numel, wrapped = core.validate_block_shape(sizes), core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = core.tuple(sizes), numel, wrapped, core.constexpr(numel)
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_tensor = shapes[sizes]

    def with_element_type(self: Any, scalar_ty: Any) -> Any:
        made = object.__new__(core.block_type)
        made.__dict__ = self.__dict__ | {"element_ty": scalar_ty}
        return made

    no_shape, one = core.tuple([]), core.constexpr(1)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else (no_shape, one)

    core._unwrap_if_constexpr = unwrap_soon
    core.block_type.__init__ = make_block_type
    core.block_type.with_element_ty = with_element_type
    core.block_type.to_ir = lambda self, _: self
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = make_tensor
    core.dtype.is_int = lambda self: self.name in integers
    core.dtype.__eq__ = lambda self, other: self is other or are_equal(self, other)


def _spare_operations(interpreter: Any, core: Any) -> None:
    semantic = interpreter.TritonSemantic
    to_tensor, cast, broadcast = semantic.to_tensor, semantic.cast, semantic.broadcast_impl_value
    common_type = semantic.computation_type_impl
    common: dict[tuple[Any, ...], Any] = {}

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """A builtin looks whether it has a builder. Here it has."""
        known, function = semantic(builder), getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = known
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        """Whether the array's numbers are as wide as their type is asked of each."""
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def to_tensor_soon(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else to_tensor(self, x, check_type)

    def cast_soon(self: Any, value: Any, dst_ty: Any, rounding: Any = None) -> Any:
        return value if value.dtype is dst_ty.scalar else cast(self, value, dst_ty, rounding)

    def broadcast_soon(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def common_type_once(self: Any, a: Any, a_is_scalar: bool, b: Any, *others: bool) -> Any:
        key = a.name, a_is_scalar, b.name, *others
        if key not in common:
            common[key] = common_type(self, a, a_is_scalar, b, *others)
        return common[key]

    interpreter._patch_attr = patch_attribute
    interpreter.TensorHandle.__init__ = make_handle
    semantic.to_tensor, semantic.cast, semantic.broadcast_impl_value = to_tensor_soon, cast_soon, broadcast_soon
    semantic.computation_type_impl = common_type_once


if HAS_TRITON and COMPILE_ONLY:
    compilations.install()
elif HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language
    from triton.runtime import interpreter

    _mend(interpreter)
    _spare(interpreter, triton.language)
    _spare_types(triton.language.core)
    _spare_operations(interpreter, triton.language.core)
