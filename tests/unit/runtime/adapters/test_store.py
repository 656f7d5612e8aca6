"""Adapters in host memory: which are kept, and what happens to the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.runtime.adapters.slots import HostAdapter
from quire.runtime.adapters.store import AdapterStore
from quire.types.errors import InvalidRequest


class Folders:
    """Reads a file whose text is the digest."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def read(self, folder: str) -> HostAdapter:
        self.reads.append(Path(folder).name)
        if not Path(folder).exists():
            raise InvalidRequest("lora_path", f"{Path(folder).name} is gone")
        return HostAdapter(Path(folder).read_text(), 4, ())


def made(tmp_path: Path, capacity: int) -> tuple[AdapterStore, Folders]:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(f"digest of {name}")
    folders = Folders()
    return AdapterStore(folders, capacity), folders  # type: ignore[arg-type]


def test_the_least_recently_used_adapter_is_read_again(tmp_path: Path) -> None:
    store, folders = made(tmp_path, 2)
    info = store.read("one", str(tmp_path / "a"))
    assert (info.name, info.digest, info.folder) == ("one", "digest of a", str(tmp_path / "a"))
    store.read("two", str(tmp_path / "b"))
    store.get("digest of a")
    store.read("three", str(tmp_path / "c"))
    store.get("digest of a")
    assert folders.reads == ["a", "b", "c"]
    assert store.get("digest of b").digest == "digest of b"
    assert folders.reads == ["a", "b", "c", "b"]
    store.check()


def test_an_adapter_whose_files_changed_is_refused(tmp_path: Path) -> None:
    store, _ = made(tmp_path, 1)
    store.read("one", str(tmp_path / "a"))
    store.read("two", str(tmp_path / "b"))
    (tmp_path / "a").write_text("another")
    with pytest.raises(InvalidRequest, match="^model: .* have changed since"):
        store.get("digest of a")
    assert store.get("digest of b").digest == "digest of b"


@pytest.mark.parametrize("last", ["gone", "changed"])
def test_an_adapter_that_is_in_two_folders_is_read_from_the_one_that_still_has_it(last: str, tmp_path: Path) -> None:
    store, _ = made(tmp_path, 1)
    copy = tmp_path / "copy"
    copy.write_text("digest of a")
    store.read("one", str(tmp_path / "a"))
    store.read("same", str(copy))
    store.read("two", str(tmp_path / "b"))
    copy.write_text("another") if last == "changed" else copy.unlink()
    assert store.get("digest of a").digest == "digest of a"
    store.read("two", str(tmp_path / "b"))
    (tmp_path / "a").unlink()
    with pytest.raises(InvalidRequest, match=r"^model: .*(have changed since|copy is gone)"):
        store.get("digest of a")
    store.forget("digest of a")
    with pytest.raises(InvalidRequest, match="is not loaded"):
        store.get("digest of a")


def test_a_forgotten_adapter_is_not_known(tmp_path: Path) -> None:
    store, _ = made(tmp_path, 2)
    store.read("one", str(tmp_path / "a"))
    store.forget("digest of a")
    store.forget("digest of a")
    assert store.num_held == 0
    with pytest.raises(InvalidRequest, match="is not loaded"):
        store.get("digest of a")


def test_threads_may_read_and_forget_at_once(tmp_path: Path) -> None:
    store, _ = made(tmp_path, 2)

    def churn(name: str) -> None:
        for _ in range(50):
            store.read(name, str(tmp_path / name))
            store.get(f"digest of {name}")
            store.forget(f"digest of {name}")

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(churn, "abc"))
    store.check()
    assert store.num_held == 0
