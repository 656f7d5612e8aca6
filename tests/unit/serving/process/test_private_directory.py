"""Every server has a folder of its own, and clears away those that killed servers left."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from quire.serving.process.private_directory import private_directory, write_admin_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_for_this_user_alone_and_gone_afterwards(home: Path) -> None:
    with private_directory() as directory:
        (directory / "socket").touch()
        assert directory.stat().st_mode & 0o077 == 0
    assert list(home.iterdir()) == []


def test_one_that_a_killed_server_left_is_removed_and_one_in_use_is_kept(home: Path) -> None:
    with private_directory() as used:
        abandoned = home / "quire-serve-abandoned"
        abandoned.mkdir()
        (abandoned / "engine-1").touch()
        with private_directory() as own:
            assert set(home.iterdir()) == {used, own}


def test_what_only_looks_like_one_is_left_alone(home: Path) -> None:
    kept = home / "elsewhere"
    kept.mkdir()
    (home / "quire-serve-link").symlink_to(kept)
    (home / "quire-serve-file").touch()
    (home / "quire-bench").mkdir()
    with private_directory():
        pass
    assert {path.name for path in home.iterdir()} == {
        "elsewhere",
        "quire-serve-link",
        "quire-serve-file",
        "quire-bench",
    }


def test_a_home_too_long_for_the_address_of_a_socket_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = home / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_directory() as directory:
        assert len(str(directory)) < 90


def test_a_generated_key_that_is_not_printed_is_written_for_this_user_only(tmp_path: Path) -> None:
    path = write_admin_key(tmp_path, "sk-made", printed_key=None)
    assert path is not None
    assert Path(path).read_text() == "sk-made\n"
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


@pytest.mark.parametrize(("made", "printed"), [(None, None), ("sk-made", "sk-made")])
def test_no_key_is_written_if_none_was_generated_or_it_is_printed(
    tmp_path: Path, made: str | None, printed: str | None
) -> None:
    assert write_admin_key(tmp_path, made, printed) is None
    assert not list(tmp_path.iterdir())
