"""How many requests go to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from quire.engine.progress import Backlog
from quire.serving.dispatch.engine_capacity import EngineCapacity
from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.process.edge_loads import EdgeLoadTable
from quire.serving.process.link import EngineLink, EngineReady


class Link:
    found: Backlog | None = None

    def backlog(self) -> Backlog | None:
        return self.found


class Request:
    def __init__(self, num_sequences: int = 1) -> None:
        self.num_sequences = num_sequences


def ready(max_num_seqs: int, policy: str = "fcfs") -> EngineReady:
    return EngineReady(1, 512, 97, max_num_seqs, 4, 64, "float32", "cpu", policy, ())


def make(table: EdgeLoadTable | None = None, num_workers: int = 1) -> tuple[EngineCapacity, Link]:
    link = Link()
    return EngineCapacity(cast("EngineLink", link), table or EdgeLoadTable(), num_workers), link


def fill(capacity: EngineCapacity, engine: EngineReady) -> int:
    count = 0
    while count < 1_000 and capacity.has_room(engine, 1):
        capacity.add(cast("InFlightRequest", Request()))
        count += 1
    return count


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_an_engine_gets_as_many_sequences_as_it_runs(policy: str) -> None:
    capacity, link = make()
    assert fill(capacity, ready(8, policy)) == 8
    capacity.remove(cast("InFlightRequest", Request()))
    link.found = Backlog(1, 0)
    assert fill(capacity, ready(8, policy)) == 1


def test_a_policy_that_chooses_among_waiting_requests_gets_some_to_choose_from() -> None:
    capacity, _ = make()
    assert fill(capacity, ready(8, "lpm")) == 16


def test_a_request_with_more_sequences_than_there_are_rows_is_submitted_alone() -> None:
    capacity, _ = make()
    assert capacity.has_room(ready(4), 9)
    capacity.add(cast("InFlightRequest", Request(9)))
    assert not capacity.has_room(ready(4), 1)


def test_an_engine_that_could_not_run_what_it_has_gets_no_more() -> None:
    capacity, link = make()
    link.found = Backlog(1, 0)
    assert fill(capacity, ready(64)) == 33  # then the engine must show that it can run them
    link.found = Backlog(2, 32)
    assert fill(capacity, ready(64)) == 0
    link.found = Backlog(3, 30)
    assert fill(capacity, ready(64)) == 2
    link.found = Backlog(4, 0)
    assert fill(capacity, ready(64)) == 29  # all rows


def test_edges_share_the_engine_while_all_have_queues(tmp_path: Path) -> None:
    tables = [EdgeLoadTable(tmp_path / "loads", num_seats=2, seat=seat, edge=seat + 1) for seat in range(2)]
    (first, _), (second, _) = (make(table, num_workers=2) for table in tables)
    tables[1].put(5, 50, 0)  # the other edge has a queue
    assert fill(first, ready(8)) == 4
    tables[0].put(5, 50, 4, 4)
    assert fill(second, ready(8)) == 4
    tables[1].put(0, 0, 0)
    assert fill(first, ready(8)) == 4  # all rows, when no other edge wants them
