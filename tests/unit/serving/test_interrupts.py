from __future__ import annotations

import signal
import threading

import pytest

from quire.serving.interrupts import DeferredInterrupt


def test_an_interrupt_waits_for_the_check() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        reached = True
        interrupt.check()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt was held back")


def test_without_an_interrupt_nothing_happens() -> None:
    with DeferredInterrupt() as interrupt:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        interrupt.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_is_left_alone() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with DeferredInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_other_threads_may_use_it_and_keep_the_handler() -> None:
    def work() -> None:
        with DeferredInterrupt() as interrupt:
            interrupt.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
