"""Opens prompt_reader.cpp, the compiled reader of prompts. setup.py reads this file too."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import sysconfig
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_int64, c_uint64, c_void_p
from pathlib import Path

NAME = "_prompt_reader"
COMPILE = ("-O3", "-g0", "-std=c++17")
NUM_FOUND = 7  # numbers before the keys, see `read`
_HERE = Path(__file__).parent


class Unavailable(Exception):
    """Why the compiled reader cannot be used; one line."""


class CompiledReader:
    """Reads a JSON body and hashes its prompt in one call. Keys differ between readers: each has secrets of its own."""

    def __init__(self, library: ctypes.PyDLL, chunk_ends: Sequence[int]) -> None:
        """`chunk_ends`: where the chunks of a prompt end, after a 0."""
        self._ends, self._found = array("q", chunk_ends), array("q", bytes(8 * (NUM_FOUND + len(chunk_ends))))
        keys = (c_uint64 * 4)(*(secrets.randbits(64) for _ in range(4)))
        self._reader = _Reader(keys, _address(self._ends), len(self._ends), _address(self._found))
        self._at = ctypes.addressof(self._reader)
        self._read, self._keys, self._root = (
            library.quire_read_prompt, library.quire_chunk_keys, library.quire_prompt_root,
        )  # fmt: skip
        self._read.argtypes = [c_void_p, c_char_p, c_int64, c_char_p, c_int64, c_int64]
        self._keys.argtypes = [c_void_p, c_int64, c_char_p, c_int64]
        self._root.argtypes = [c_void_p, c_char_p, c_int64, c_char_p, c_int64, c_char_p, c_int64]
        self._read.restype = self._keys.restype = self._root.restype = c_int64

    def read(self, body: bytes, tenant: bytes, *, is_fork: bool) -> list[int]:
        """Read a body. Returns where the JSON strings of its model, its session and its stored answer begin and end (0
        and 0: it has none), the bytes of its prompt, and the keys of the prompt's chunks. Returns an empty list for a
        body that is invalid or has a rare form: then msgspec must read it."""
        count = self._read(self._at, body, len(body), tenant, len(tenant), is_fork)
        return self._found[:count].tolist()

    def chunk_keys(self, root: int, text: bytes) -> list[int]:
        """Return the keys of the whole chunks of `text`."""
        return self._found[: self._keys(self._at, root, text, len(text))].tolist()

    def root(self, tenant: bytes, salt: bytes, model: bytes) -> int:
        """Return the root of the keys of prompts that may share a cache."""
        return int(self._root(self._at, tenant, len(tenant), salt, len(salt), model, len(model)))


class _Reader(ctypes.Structure):
    """The structure of the same name in prompt_reader.cpp."""

    _fields_ = (("secrets", c_uint64 * 4), ("ends", c_void_p), ("num_ends", c_int64), ("found", c_void_p))


def open_reader(chunk_ends: Sequence[int]) -> CompiledReader:
    """Open the compiled reader. Raises Unavailable if it was not built, or from other sources than those here."""
    file = _HERE / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not file.is_file():
        raise Unavailable("the compiled reader of prompts was not built; install a C++ compiler and reinstall Quire")
    try:
        library = ctypes.PyDLL(str(file))  # keeps Python's lock: a call is shorter than getting it back
    except OSError as error:
        raise Unavailable(f"the compiled reader of prompts does not load: {error}") from None
    library.quire_reader_source.restype = c_char_p
    if library.quire_reader_source().decode() != digest_of_sources(_HERE):
        raise Unavailable("the compiled reader of prompts was built from other sources; reinstall Quire")
    return CompiledReader(library, chunk_ends)


def digest_of_sources(folder: Path) -> str:
    """Return a digest of what the reader is compiled from, flags included."""
    files = (folder / "prompt_reader.cpp", folder / "json_text.h")
    return hashlib.sha256(b"".join((" ".join(COMPILE).encode(), *map(Path.read_bytes, files)))).hexdigest()


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
