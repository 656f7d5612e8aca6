"""Mailboxes and the pace of waking their readers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from quire.serving.dispatch.mailbox import Delta, Failure, Mailbox, StreamThrottle


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until a test moves it on."""

    now = 0.0

    def time(self) -> float:
        return self.now


async def is_woken(mailbox: Mailbox) -> bool:
    waiting = asyncio.ensure_future(mailbox.wait())
    for _ in range(4):  # a timer that is due runs, and wakes what waits
        await asyncio.sleep(0)
    if waiting.done():
        return True
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    return False


def test_a_wake_before_the_wait_is_not_lost() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), 1)
        mailbox.wake()
        await mailbox.wait()
        assert not await is_woken(mailbox)

    asyncio.run(run())


def test_news_come_out_in_order_and_are_measured() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), 1)
        deltas = [Delta(0, "ab", (1,)), Delta(1, "c", (2,), (b"xyz",))]
        for delta in deltas:
            mailbox.put(delta)
        assert mailbox.pending_bytes >= len("abcxyz")
        assert mailbox.take() == deltas
        assert mailbox.pending_bytes == 0

    asyncio.run(run())


def test_the_first_failure_counts() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), 1)
        mailbox.fail(Failure("engine_down"))
        mailbox.fail(Failure("drain"))
        assert mailbox.failure == Failure("engine_down")
        assert mailbox.is_over

    asyncio.run(run())


def test_few_streams_are_woken_at_every_step() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        pace, mailbox = StreamThrottle(loop, max_streams=4, gap=60.0), Mailbox(loop, 1)
        for _ in range(3):
            pace.deliver([mailbox], num_streams=4)
            assert await is_woken(mailbox)

    asyncio.run(run())


def test_many_streams_are_woken_at_first_and_last_news_and_once_per_gap_between() -> None:
    loop = ClockedLoop()

    async def run() -> None:
        pace, mailbox = StreamThrottle(loop, max_streams=4, gap=0.02), Mailbox(loop, 1)
        pace.deliver([mailbox], num_streams=5)
        assert await is_woken(mailbox)
        loop.now += 0.015
        pace.deliver([mailbox], num_streams=5)
        assert not await is_woken(mailbox)
        loop.now += 0.006
        assert await is_woken(mailbox)  # the gap ended by itself
        pace.deliver([mailbox], num_streams=5)
        assert not await is_woken(mailbox)
        mailbox.num_open = 0
        pace.deliver([mailbox], num_streams=5)
        assert await is_woken(mailbox)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())


def test_a_mailbox_whose_reader_left_is_forgotten() -> None:
    loop = ClockedLoop()

    async def run() -> None:
        pace, mailbox = StreamThrottle(loop, max_streams=0, gap=0.01), Mailbox(loop, 1)
        pace.deliver([mailbox], num_streams=1)
        await mailbox.wait()
        pace.deliver([mailbox], num_streams=1)
        pace.forget(mailbox)
        loop.now += 0.02
        assert not await is_woken(mailbox)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
