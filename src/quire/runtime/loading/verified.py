"""Remembers which files were hashed and have not changed since, with a note per file in the cache directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO

from quire.runtime.loading.catalogue import PackagedModel
from quire.runtime.loading.progress import Progress
from quire.types.errors import ModelLoadError

BLOCK = 1 << 20


def is_verified(path: Path, model: PackagedModel, cache: Path) -> bool:
    """Whether the file has the right size, and a note records that it had the right hash and has not changed since.
    Cheap."""
    try:
        return path.stat().st_size == model.size and _note(path, cache).read_text() == _describe(path, model)
    except (OSError, ValueError):
        return False


def verify(path: Path, model: PackagedModel, cache: Path, *, recheck: bool, progress: Progress) -> None:
    """Hash the file unless a note shows that it was verified, and write a note. Raises ModelLoadError if size or hash
    is wrong."""
    if not recheck and is_verified(path, model, cache):
        return
    try:
        if path.stat().st_size != model.size:
            raise ModelLoadError(str(path), f"has {path.stat().st_size} bytes, expected {model.size}", fix="remove it")
        with path.open("rb") as source:
            digest = _hash(source, None, model, progress)
    except OSError as error:
        raise ModelLoadError(str(path), f"cannot be read: {error.strerror}") from None
    _refuse_other(str(path), digest, model)
    leave_note(path, model, cache)


def copy_checked(source: IO[bytes], target: Path, model: PackagedModel, progress: Progress) -> None:
    """Write `source` to a new file and flush it to disk. Raises ModelLoadError unless the hash is right."""
    with target.open("xb") as file:
        digest = _hash(source, file, model, progress)
        file.flush()
        os.fsync(file.fileno())
    _refuse_other(model.file, digest, model)


def _hash(source: IO[bytes], target: IO[bytes] | None, model: PackagedModel, progress: Progress) -> str:
    digest, done, what = hashlib.sha256(), 0, f"checking {model.file}"
    while done <= model.size and (block := source.read(BLOCK)):
        digest.update(block)
        done += len(block)
        if target is not None:
            target.write(block)
        progress(what, min(done, model.size), model.size)
    return digest.hexdigest()


def _refuse_other(file: str, digest: str, model: PackagedModel) -> None:
    if digest != model.sha256:
        raise ModelLoadError(
            file, f"has sha256 {digest}, expected {model.sha256}", fix="remove it; it will be fetched again"
        )


def _note(path: Path, cache: Path) -> Path:
    return cache / "verified" / hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]


def _describe(path: Path, model: PackagedModel) -> str:
    return f"{model.sha256} {model.size} {path.stat().st_mtime_ns} {path.absolute()}\n"


def leave_note(path: Path, model: PackagedModel, cache: Path) -> None:
    """Write the note. Ignores errors: without it, the file is hashed again next time."""
    note = _note(path, cache)
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = note.with_name(f"{note.name}.{os.getpid()}")
        part.write_text(_describe(path, model))
        part.replace(note)
    except OSError:
        return
