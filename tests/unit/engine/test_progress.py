"""A watcher in another process sees whether the engine moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine import progress
from quire.engine.progress import ProgressReader, ProgressRecord


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_only_an_engine_that_stays_in_one_step_is_stuck(tmp_path: Path, clock: Clock) -> None:
    record = ProgressRecord(tmp_path / "progress")
    reader = ProgressReader(tmp_path / "progress")
    clock.now += 50
    assert [reader.stuck_for(), reader.stuck_for()] == [0.0, 0.0]  # idle
    record.begin_step()
    clock.now += 5
    assert [reader.stuck_for(), reader.stuck_for()] == [0.0, 5.0]  # sure at the second look
    record.begin_step()
    clock.now += 1
    assert [reader.stuck_for(), reader.stuck_for()] == [0.0, 1.0]
    record.idle()
    clock.now += 50
    assert [reader.stuck_for(), reader.stuck_for()] == [0.0, 0.0]
    reader.close()
    record.close()


def test_a_step_that_makes_progress_gets_its_whole_time_again(tmp_path: Path, clock: Clock) -> None:
    record = ProgressRecord(tmp_path / "progress")
    reader = ProgressReader(tmp_path / "progress")
    record.begin_step()
    clock.now += 9
    record.extend_step()
    clock.now += 3
    assert [reader.stuck_for(), reader.stuck_for()] == [0.0, 3.0]
    record.idle()
    record.extend_step()
    assert [reader.stuck_for(), reader.stuck_for()] == [0.0, 0.0]
    reader.close()
    record.close()


def test_readers_see_the_backlog_of_the_last_step_that_ended(tmp_path: Path) -> None:
    record = ProgressRecord(tmp_path / "progress")
    reader = ProgressReader(tmp_path / "progress")
    assert reader.backlog() is None
    record.begin_step()
    record.end_step(3)
    assert reader.backlog() == (1, 3)
    record.begin_step()
    record.end_step(0)
    assert reader.backlog() == (2, 0)
    reader.close()
    record.close()


def test_the_record_is_for_this_user_alone(tmp_path: Path) -> None:
    ProgressRecord(tmp_path / "progress").close()
    assert (tmp_path / "progress").stat().st_mode & 0o077 == 0


def test_edges_read_whether_the_engine_refuses_requests(tmp_path: Path) -> None:
    record = ProgressRecord(tmp_path / "progress")
    reader = ProgressReader(tmp_path / "progress")
    record.begin_step()
    record.end_step(3)
    for refuses in (True, False):
        record.set_refuses(refuses=refuses)
        assert reader.refuses() == refuses
        assert reader.backlog() == (1, 3)
