from __future__ import annotations

import io
import signal
import threading

import pytest

from quire.serving.terminal import DeferredInterrupt, LoadingProgress, ProgressLine


def test_a_shown_line_ends_complete_and_with_a_line_break() -> None:
    stream = io.StringIO()
    with ProgressLine("generating", 3, shown=True, stream=stream) as line:
        line.update(1, "10.0 tokens/s")
        line.update(3, "12.5 tokens/s")
    last = stream.getvalue().split("\r")[-1]
    assert last.endswith("\n")
    assert "generating [####################] 3/3  12.5 tokens/s" in last


def test_a_shorter_note_leaves_nothing_of_a_longer_one() -> None:
    stream = io.StringIO()
    with ProgressLine("x", 1, shown=True, stream=stream) as line:
        line.update(1, "a long note")
        line.update(1, "a")
    first, second, _ = stream.getvalue().split("\r")[1:]
    assert len(second) >= len(first)


def test_off_a_terminal_nothing_is_written_unless_asked() -> None:
    stream = io.StringIO()
    with ProgressLine("x", 2, stream=stream) as line:
        line.update(2)
    assert stream.getvalue() == ""


def test_a_loader_gets_one_line_for_each_thing_it_loads(capsys: object) -> None:
    progress = LoadingProgress(shown=True)
    progress("weights", 1, 2)
    progress("weights", 2, 2)
    progress("tokenizer", 1, 1)
    progress.close()
    written = capsys.readouterr().err  # type: ignore[attr-defined]
    assert written.count("\n") == 2
    assert written.index("weights") < written.index("tokenizer")


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
