"""A disk that is full, broken, slow, emptied or damaged fails no request and changes no token: a real engine over real
files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from disk_bench import PATIENCE, keep_pace
from faulty_folder import BROKEN, FULL, FaultyFolder
from quire.config.model import Heads
from quire.config.tiers import TierConfig
from quire.runtime.tiers import make
from quire.runtime.tiers.folder import PrivateFolder
from tiny_models import VOCAB, random_checkpoint, tiny_config
from worker_executor import TinyEngine

MODEL = tiny_config("llama", num_layers=2, hidden_size=32, intermediate_size=32, heads=Heads(2, 1, 16))
RNG = random.Random(4)
PROMPTS = [[RNG.randrange(1, VOCAB) for _ in range(26)] for _ in range(6)]
Fault = Callable[[FaultyFolder], None]


class Served:
    """An engine whose device and host memory hold a fraction of the prompts, over a folder that can be broken.

    The disk keeps pace with the engine, unless reads hang.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, lists: bool = True) -> None:
        self.folder = FaultyFolder(PrivateFolder(str(path)))
        if not lists:
            self.folder.listing.clear()
        monkeypatch.setattr(make, "PrivateFolder", lambda path: self.folder)
        tiers = TierConfig(host_blocks=12, disk_path=str(path), disk_blocks=500)
        self.engine = TinyEngine(random_checkpoint(MODEL), num_blocks=24, rows=2, max_len=64, tiers=tiers)
        gate = self.folder.gate
        self.disk = keep_pace(self.engine.executor.worker.tiers, lists=lists, hangs=lambda: not gate.is_set())

    def answers(self) -> list[list[list[int]]]:
        return [self.engine.answers([prompt], max_tokens=4)[0] for prompt in PROMPTS]

    def failures(self) -> dict[str, int]:
        return {reason: count for reason, count in self.engine.core.stats().tiers.failures.items() if count}

    def close(self) -> None:
        self.folder.gate.set()
        self.folder.listing.set()
        self.engine.core.close()


@pytest.fixture(scope="module")
def wanted() -> list[list[list[int]]]:
    engine = TinyEngine(random_checkpoint(MODEL), num_blocks=400, rows=2, max_len=64)
    return [engine.answers([prompt], max_tokens=4)[0] for prompt in PROMPTS]


def each_file(folder: FaultyFolder, damage: Callable[[Path], None]) -> None:
    for file in Path(folder.inner.path).iterdir():
        damage(file)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(bytes(data))


FAULTS: dict[str, tuple[Fault, str]] = {
    "unreadable": (lambda folder: folder.errors.update(open=BROKEN), "io"),
    "broken while reading": (lambda folder: folder.errors.update(read=BROKEN), "io"),
    "emptied": (lambda folder: each_file(folder, Path.unlink), "missing"),
    "deleted": (lambda folder: shutil.rmtree(folder.inner.path), "missing"),
    "flipped": (lambda folder: each_file(folder, flip), "corrupt"),
    "cut short": (lambda folder: each_file(folder, lambda file: file.write_bytes(file.read_bytes()[:90])), "corrupt"),
    "hanging": (lambda folder: folder.gate.clear(), "slow"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_disk_that_fails_after_it_was_filled_costs_time_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[list[list[int]]]
) -> None:
    fault, reason = FAULTS[name]
    served = Served(tmp_path / "cache", monkeypatch)
    assert served.answers() == wanted
    assert served.answers() == wanted
    assert served.engine.core.stats().tiers.fetched > 0
    assert served.failures() == {}
    fault(served.folder)
    assert served.answers() == wanted
    assert served.failures()[reason] > 0
    served.close()


@pytest.mark.parametrize(("number", "reason"), [(FULL, "full"), (BROKEN, "io")])
def test_a_disk_that_takes_nothing_fails_no_request(
    number: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[list[list[int]]]
) -> None:
    served = Served(tmp_path / "cache", monkeypatch)
    served.folder.errors["write"] = number
    assert served.answers() == wanted
    assert served.answers() == wanted
    assert served.failures()[reason] > 0
    assert served.disk.flush(seconds=PATIENCE)
    assert list((tmp_path / "cache").iterdir()) == []
    served.close()


@pytest.mark.parametrize("lists", [True, False])
def test_a_reset_deletes_what_an_earlier_engine_wrote_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: bool
) -> None:
    first = Served(tmp_path / "cache", monkeypatch)
    first.answers()
    first.close()
    assert list((tmp_path / "cache").iterdir())
    second = Served(tmp_path / "cache", monkeypatch, lists=lists)
    second.engine.core.reset_cache()
    second.close()
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_one_engine_wrote_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[list[list[int]]]
) -> None:
    first = Served(tmp_path / "cache", monkeypatch)
    assert first.answers() == wanted
    first.close()
    second = Served(tmp_path / "cache", monkeypatch)
    assert second.answers() == wanted
    assert second.engine.core.stats().disk_hits > 0
    assert second.failures() == {}
    second.close()
