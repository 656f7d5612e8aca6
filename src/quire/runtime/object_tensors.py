"""Finds the tensors that objects hold: layers keep packed weights in objects that are no modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType

import numpy as np
import torch
from torch import Tensor

from quire.types.errors import QuireError

Put = Callable[[], object]  # puts one new value into the place of an old one

ADDED_LATER = ("adapters",)  # attributes that are set after a layer is finished
_NUMBERS = (int, float)


class DoesNotMatch(QuireError):
    """An object has another form than the one that it is to replace."""


def reachable_tensors(root: object) -> Iterator[Tensor]:
    """Yield the tensors that can be reached from an object, each once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        else:
            waiting += _members(one)


def _members(one: object) -> Iterator[object]:
    """Yield the objects that an object refers to. Objects of other libraries yield nothing."""
    if isinstance(one, dict):
        yield from one.values()
    elif isinstance(one, tuple | list | set | frozenset):
        yield from one
    elif isinstance(one, FunctionType):
        yield from (cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell))
    elif _is_partial(one):
        yield from (one.func, one.args)  # type: ignore[attr-defined]
    elif hasattr(one, "__self__"):
        yield one.__self__
    elif _is_own(one):
        yield from _attributes(one).values()


def _attributes(one: object) -> dict[str, object]:
    found = dict(getattr(one, "__dict__", {}))
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                found[name] = getattr(one, name, None)
    return found


def replacements(old: object, new: object, where: str) -> list[Put]:
    """Return the calls that put the values of `new` into the place of those of `old`, which keeps its memory. Objects
    that both share are left alone. Raises DoesNotMatch if the two have different forms."""
    found: list[Put] = []
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[object, object]] = [(old, new)]
    while waiting:
        one, other = waiting.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if not other.is_meta:
                found.append(_copy(one, other, where))
        elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.shape == other.shape:
            found.append(lambda one=one, other=other: np.copyto(one, other))  # type: ignore[misc]
        elif type(one) is not type(other):
            raise DoesNotMatch(f"{where}: {_shown(one)} cannot become {_shown(other)}")
        else:
            waiting += _paired_members(one, other, where, found)
    return found


def _paired_members(one: object, other: object, where: str, found: list[Put]) -> Iterator[tuple[object, object]]:
    """Yield the members of two objects of the same type, in pairs."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from ((one[name], value) for name, value in other.items() if name in one)
    elif isinstance(one, tuple | list) and isinstance(other, tuple | list):
        if len(one) != len(other):
            raise DoesNotMatch(f"{where}: {len(one)} parts cannot become {len(other)}")
        yield from zip(one, other, strict=True)
    elif isinstance(one, FunctionType) and isinstance(other, FunctionType):
        if one.__code__ is not other.__code__:
            raise DoesNotMatch(f"{where}: {one.__qualname__} cannot become {other.__qualname__}")
        for cell, its in zip(one.__closure__ or (), other.__closure__ or (), strict=True):
            if _is_packed(cell):
                found.append(lambda cell=cell, its=its: setattr(cell, "cell_contents", its.cell_contents))  # type: ignore[misc]
            elif _is_filled(cell) or _is_filled(its):
                yield cell.cell_contents, its.cell_contents
    elif _is_partial(one):
        yield one.func, other.func  # type: ignore[attr-defined]
        yield one.args, other.args  # type: ignore[attr-defined]
    elif isinstance(one, MethodType) and isinstance(other, MethodType):
        yield one.__self__, other.__self__
    elif _is_own(one):
        mine = _attributes(one)
        for name, value in _attributes(other).items():
            if name in ADDED_LATER:
                continue
            if type(value) in _NUMBERS and type(mine.get(name)) is type(value):
                if value != mine[name]:
                    found.append(lambda name=name, value=value: object.__setattr__(one, name, value))  # type: ignore[misc]
            elif name in mine:
                yield mine[name], value
    elif not _is_same_value(one, other):
        raise DoesNotMatch(f"{where}: {_shown(one)} cannot become {_shown(other)}")


def _copy(old: Tensor, new: Tensor, where: str) -> Put:
    if old.shape != new.shape or old.dtype != new.dtype:
        before, after = (f"{each.dtype} {list(each.shape)}" for each in (old, new))
        raise DoesNotMatch(f"{where}: {before} cannot become {after}".replace("torch.", ""))
    if old.is_mkldnn:
        raise DoesNotMatch(f"{where}: a weight packed by oneDNN cannot be replaced here")
    if old.data_ptr() == new.data_ptr() and old.stride() == new.stride():
        return _nothing  # it was loaded into the old memory
    return lambda: old.copy_(new)


def _nothing() -> None:
    """Do nothing."""


def _is_packed(cell: CellType) -> bool:
    """Whether a closure holds a weight packed by oneDNN, which only the closure refers to."""
    return _is_filled(cell) and isinstance(cell.cell_contents, Tensor) and cell.cell_contents.is_mkldnn


def _is_same_value(one: object, other: object) -> bool:
    """Whether two values without members, or of other libraries, count as equal."""
    return one == other if isinstance(one, int | float | str | bytes | torch.dtype | torch.device) else True


def _is_own(one: object) -> bool:
    return type(one).__module__.startswith(("quire.", "torch.nn.modules."))


def _is_partial(one: object) -> bool:
    return hasattr(one, "func") and hasattr(one, "args")


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _shown(one: object) -> str:
    return f"{type(one).__name__} {one!r:.40}" if isinstance(one, bool | int | float | str) else type(one).__name__
