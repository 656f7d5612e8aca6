"""Edges see what waits at the others."""

from __future__ import annotations

from pathlib import Path

from quire.serving.process.edge_loads import EdgeLoad, EdgeLoadTable


def test_every_edge_reads_what_the_others_wrote(tmp_path: Path) -> None:
    boards = [EdgeLoadTable(tmp_path / "edge_loads", num_seats=3, seat=seat, edge=seat + 1) for seat in range(2)]
    boards[0].put(3, 30, 2, draining=False)
    boards[1].put(4, 50, 0, preparing=1, draining=True)
    assert boards[0].elsewhere() == (5, 50)  # what is prepared waits too
    assert boards[1].elsewhere() == (3, 30)
    assert boards[0].loads() == [EdgeLoad(1, 3, 0, 30, 2, False), EdgeLoad(2, 4, 1, 50, 0, True)]
    assert (tmp_path / "edge_loads").stat().st_mode & 0o777 == 0o600


def test_an_edge_that_takes_a_seat_clears_what_its_predecessor_left(tmp_path: Path) -> None:
    first = EdgeLoadTable(tmp_path / "edge_loads", num_seats=2, seat=0, edge=1)
    EdgeLoadTable(tmp_path / "edge_loads", num_seats=2, seat=1, edge=2).put(9, 90, 1, draining=False)
    EdgeLoadTable(tmp_path / "edge_loads", num_seats=2, seat=1, edge=3)
    assert first.elsewhere() == (0, 0)
    assert [load.edge for load in first.loads()] == [1, 3]


def test_an_edge_alone_has_nobody_elsewhere() -> None:
    edge_loads = EdgeLoadTable()
    edge_loads.put(5, 50, 1, draining=False)
    assert edge_loads.elsewhere() == (0, 0)
    assert edge_loads.loads() == [EdgeLoad(0, 5, 0, 50, 1, False)]
