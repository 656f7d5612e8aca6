"""The memory that native libraries hold through the C library's malloc."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def _find() -> tuple[Callable[[], _MallInfo], Callable[[int], int]] | None:
    library = ctypes.CDLL(None)
    info, trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
    if info is None or trim is None:
        return None
    info.restype = _MallInfo
    return info, trim


_LIBRARY = _find()


def native_bytes() -> int:
    """Return the bytes in use in malloc's heaps, without large blocks that are mapped separately; 0 if unknown."""
    return 0 if _LIBRARY is None else int(_LIBRARY[0]().uordblks)


def give_back() -> None:
    """Return free memory to the system, if the C library supports it."""
    if _LIBRARY is not None:
        _LIBRARY[1](0)
