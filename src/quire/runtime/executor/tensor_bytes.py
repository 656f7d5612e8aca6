"""Counts the memory that the weights of a model take, as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

from torch import Tensor


def tensor_bytes(root: object) -> int:
    """Return the bytes of all tensors that can be reached from an object. Shared memory counts once. Parameters and
    buffers would not be enough, as layers keep packed weights in other objects."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.is_mkldnn:  # packed by oneDNN: its storage is not accessible
                storages[id(one)] = one.numel() * one.element_size()
            elif one.device.type != "meta":
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            continue
        waiting += _members(one)
    return sum(storages.values())


def _members(one: object) -> Iterator[object]:
    """Yield the objects that an object refers to. Objects of other libraries yield nothing."""
    if isinstance(one, dict):
        yield from one.values()
    elif isinstance(one, tuple | list | set | frozenset):
        yield from one
    elif isinstance(one, FunctionType):
        yield from (cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell))
    elif hasattr(one, "func") and hasattr(one, "args"):  # functools.partial
        yield from (one.func, one.args)
    elif hasattr(one, "__self__"):
        yield one.__self__
    elif type(one).__module__.startswith(("quire.", "torch.nn.modules.")):
        yield from getattr(one, "__dict__", {}).values()
        for kind in type(one).__mro__:
            slots = getattr(kind, "__slots__", ())
            yield from (getattr(one, name, None) for name in ((slots,) if isinstance(slots, str) else slots))


def _is_filled(cell: object) -> bool:
    try:
        return cell.cell_contents is not None  # type: ignore[attr-defined]
    except ValueError:
        return False
