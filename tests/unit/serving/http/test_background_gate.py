"""Requests of batches queue for spare capacity, and lose no permit."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from quire.serving.http.batches.gate import BackgroundGate


def dispatcher() -> Any:
    engine = SimpleNamespace(max_num_seqs=4, policy="fcfs")
    loads = SimpleNamespace(elsewhere=lambda: (0, 0))
    return SimpleNamespace(engine=engine, known_engine=engine, num_waiting=0, edge_loads=loads, is_draining=False)


async def turn() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_half_of_the_engine_is_let_in_and_the_others_in_order() -> None:
    async def run() -> None:
        gate = BackgroundGate(dispatcher(), 32, 1)
        tasks = [asyncio.create_task(gate.enter()) for _ in range(4)]
        await turn()
        assert [task.done() for task in tasks] == [True, True, False, False]
        for number in (0, 1):
            permit = tasks[number].result()
            assert permit is not None
            permit.release()
            permit.release()  # once is enough
            await turn()
            assert [task.done() for task in tasks].count(True) == 3 + number

    asyncio.run(run())


def test_one_that_gives_up_takes_no_permit_along() -> None:
    async def run() -> None:
        gate = BackgroundGate(dispatcher(), 1, 1)
        first = await gate.enter()
        assert first is not None
        second, third = (asyncio.create_task(gate.enter()) for _ in range(2))
        await turn()
        first.release()  # the second has a permit now, but has not heard of it
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        assert await asyncio.wait_for(third, 60) is not None

    asyncio.run(run())


def test_a_retry_goes_before_those_without_a_line() -> None:
    async def run() -> None:
        shared = dispatcher()
        gate = BackgroundGate(shared, 1, 1)
        permit = await gate.enter()
        assert permit is not None
        later = asyncio.create_task(gate.enter())
        shared.num_waiting = 1
        retry = asyncio.create_task(permit.wait_for_retry(0))
        await turn()
        shared.num_waiting = 0
        assert await asyncio.wait_for(retry, 60)
        assert not later.done()
        permit.release()
        assert await asyncio.wait_for(later, 60) is not None

    asyncio.run(run())


def test_all_that_wait_are_sent_home_when_the_server_shuts_down() -> None:
    async def run() -> None:
        shared = dispatcher()
        shared.num_waiting = 1
        gate = BackgroundGate(shared, 32, 1)
        tasks = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await turn()
        shared.is_draining = True
        assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == [None] * 3

    asyncio.run(run())
