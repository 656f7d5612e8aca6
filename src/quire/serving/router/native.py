"""Python bindings of native.cpp: the router's compiled prompt parser and prefix tree. setup.py runs this file too."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import sysconfig
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

NAME = "_native"
COMPILE = ("-O3", "-g0", "-std=c++17")
NUM_FOUND = 7  # values before the chunk keys in the result of `NativeReader.read`
_HERE = Path(__file__).parent


_ARGUMENTS: dict[str, list[type[ctypes._SimpleCData[Any]]]] = {
    "quire_read_prompt": [c_void_p, c_char_p, c_int64, c_char_p, c_int64, c_int64],
    "quire_chunk_keys": [c_void_p, c_int64, c_char_p, c_int64],
    "quire_prompt_root": [c_void_p, c_char_p, c_int64, c_char_p, c_int64, c_char_p, c_int64],
    "quire_match": [c_void_p, c_void_p, c_int64],
    "quire_insert": [c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_int64],
    "quire_tree_bytes": [c_void_p],
    "quire_tree_size": [c_void_p],
    "quire_clear_tree": [c_void_p],
    "quire_delete_tree": [c_void_p],
    "quire_new_tree": [],
}
_VOID = ("quire_clear_tree", "quire_delete_tree")  # functions that return void


class Unavailable(Exception):
    """The compiled code cannot be used. The message is one line with the reason."""


class NativeReader:
    """Parses a JSON body and hashes its prompt in one call. Each reader has random hash keys, so the same prompt has
    different chunk keys in different readers."""

    def __init__(self, chunk_ends: Sequence[int]) -> None:
        """`chunk_ends[i]`: bytes in the first i chunks of a prompt, as CHUNK_ENDS. Raises Unavailable."""
        library = open_library()
        self._ends, self._found = array("q", chunk_ends), array("q", bytes(8 * (NUM_FOUND + len(chunk_ends))))
        keys = (c_uint64 * 4)(*(secrets.randbits(64) for _ in range(4)))
        self._reader = _Reader(keys, _address(self._ends), len(self._ends), _address(self._found))
        self._at = ctypes.addressof(self._reader)
        self._read, self._keys = library.quire_read_prompt, library.quire_chunk_keys
        self._root = library.quire_prompt_root

    def read(self, body: bytes, tenant: bytes, *, is_fork: bool) -> array[int]:
        """Parse a body. Returns the begin and end offsets in `body` of the JSON strings of the model, the session and
        the stored object (0 and 0 if the body has none), the prompt's bytes, and the prompt's chunk keys. Returns an
        empty array for a body that is invalid or has a rare form: msgspec must parse it."""
        return self._found[: self._read(self._at, body, len(body), tenant, len(tenant), is_fork)]

    def chunk_keys(self, root: int, text: bytes) -> array[int]:
        """Return the keys of the whole chunks of `text`."""
        return self._found[: self._keys(self._at, root, text, len(text))]

    def root(self, tenant: bytes, salt: bytes, model: bytes) -> int:
        """Return the root of the chunk keys: a hash of everything that prompts must have in common to share a cache."""
        return int(self._root(self._at, tenant, len(tenant), salt, len(salt), model, len(model)))


class _Reader(ctypes.Structure):
    """The layout of `Reader` in native.cpp."""

    _fields_ = (("secrets", c_uint64 * 4), ("ends", c_void_p), ("num_ends", c_int64), ("found", c_void_p))


class NativeTree:
    """A compiled set of chunk keys in the order of their last use, for `PrefixTree`."""

    def __init__(self, chunk_ends: Sequence[int]) -> None:
        """Raises Unavailable, or MemoryError."""
        library = open_library()
        self._ends = array("q", chunk_ends)
        self._ends_at = _address(self._ends)
        self._tree = library.quire_new_tree()
        if not self._tree:
            raise MemoryError
        weakref.finalize(self, library.quire_delete_tree, self._tree)
        self._match, self._insert, self._clear = library.quire_match, library.quire_insert, library.quire_clear_tree
        self._bytes, self._size = library.quire_tree_bytes, library.quire_tree_size

    def __len__(self) -> int:
        return int(self._size(self._tree))

    @property
    def num_bytes(self) -> int:
        return int(self._bytes(self._tree))

    def match(self, keys: Sequence[int]) -> int:
        numbers = _as_array(keys)
        held: int = self._match(self._tree, *numbers.buffer_info())
        return held

    def insert(self, keys: Sequence[int], count: int, held: int | None, capacity: int) -> int:
        """Insert the first `count` chunks, of which the tree already holds the first `held` (None: compute it with
        `match`). Then evict the least recently used chunks beyond `capacity` bytes. Returns `held`."""
        numbers = _as_array(keys)
        at, size = numbers.buffer_info()
        found: int = self._insert(self._tree, at, size, count, -1 if held is None else held, self._ends_at, capacity)
        return found

    def clear(self) -> None:
        self._clear(self._tree)


@cache
def open_library() -> ctypes.PyDLL:
    """Open the compiled code. Raises Unavailable if it was not built, or if its sources differ or cannot be read."""
    file = _HERE / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not file.is_file():
        raise Unavailable("the router's compiled code was not built; install a C++ compiler and reinstall Quire")
    try:
        library = ctypes.PyDLL(str(file))  # keeps the GIL: a call takes less time than acquiring it again
    except OSError as error:
        raise Unavailable(f"the router's compiled code does not load: {error}") from None
    if hasattr(library, "quire_router_source"):
        library.quire_router_source.restype = c_char_p
        try:
            digest = digest_of_sources(_HERE)
        except OSError as error:
            reason = f"the sources of the router's compiled code cannot be read: {error}; reinstall Quire"
            raise Unavailable(reason) from None
        if library.quire_router_source().decode() == digest:
            for name, arguments in _ARGUMENTS.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, None if name in _VOID else c_int64
            library.quire_new_tree.restype = c_void_p
            return library
    raise Unavailable("the router's compiled code was built from other sources; reinstall Quire")


def digest_of_sources(folder: Path) -> str:
    """Return a digest of the compiler flags and of the source files of the library."""
    files = (folder / "native.cpp", *sorted(folder.glob("*.h")))
    return hashlib.sha256(b"".join((" ".join(COMPILE).encode(), *map(Path.read_bytes, files)))).hexdigest()


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _as_array(keys: Sequence[int]) -> array[int]:
    return keys if isinstance(keys, array) else array("q", keys)
