"""Makes the import of modules with many dataclasses faster, in the processes of the command line and the server.

`dataclass` writes the source of about six methods for a class, and compiles each of them when the class is declared.
Most of these methods are never called. Imports little itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_COMPILE = "_create_fn"  # Python 3.13 has none: it compiles all methods of a class at once


@contextmanager
def lazy_methods() -> Iterator[None]:
    """Let dataclasses that are declared inside compile each generated method when it is first called. The compiled
    method replaces the lazy one in its class. A class without a docstring gets one that does not list its fields."""
    compile_method: Callable[..., FunctionType] | None = getattr(dataclasses, _COMPILE, None)
    if compile_method is None:
        yield
        return

    def make_lazy(name: str, *arguments: object, **options: Any) -> FunctionType:
        return _lazy(name, lambda: compile_method(name, *arguments, **options), options.get("globals") or {})

    setattr(dataclasses, _COMPILE, make_lazy)
    try:
        yield
    finally:
        setattr(dataclasses, _COMPILE, compile_method)


def _lazy(name: str, compile_method: Callable[[], FunctionType], module: dict[str, object]) -> FunctionType:
    compiled: FunctionType | None = None

    def lazy(self: object, *arguments: object, **named: object) -> object:
        nonlocal compiled
        if compiled is None:
            compiled = compile_method()
            compiled.__qualname__ = lazy.__qualname__
            for owner in type(self).__mro__:
                if owner.__dict__.get(name) is lazy:
                    setattr(owner, name, compiled)
        return compiled(self, *arguments, **named)

    lazy.__name__, lazy.__module__ = name, str(module.get("__name__"))
    assert isinstance(lazy, FunctionType)
    return lazy
