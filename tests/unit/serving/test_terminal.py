from __future__ import annotations

import gc
import io
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest

from quire.serving import terminal as terminal_module
from quire.serving.terminal import DeferredInterrupt, LoadingProgress, PausedCollections, ProgressLine


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


class Knot:
    """An object that refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def automatic() -> Iterator[None]:
    """Turns automatic collections on, as they are in a user's process."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    if not was_enabled:
        gc.disable()


def test_python_collects_nothing_by_itself_while_collections_are_paused(automatic: None) -> None:
    with PausedCollections():
        assert not gc.isenabled()
        lost = weakref.ref(Knot())
        kept: list[list[int]] = [[] for _ in range(5_000)]  # several times what starts an automatic collection
        assert lost() is not None
    assert gc.isenabled()
    assert len(kept) == 5_000


def test_a_call_that_fails_leaves_automatic_collections_as_they_were(automatic: None) -> None:
    with pytest.raises(ValueError, match="failed"), PausedCollections():
        raise ValueError("failed")
    assert gc.isenabled()
    gc.disable()
    with PausedCollections():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_collections_that_the_program_turned_off_stay_off(automatic: None) -> None:
    gc.disable()
    garbage = PausedCollections()
    garbage.pause()
    garbage.pause()
    garbage.resume()
    assert not gc.isenabled()
    gc.enable()
    garbage.pause()
    garbage.resume()
    garbage.resume()
    assert gc.isenabled()


def test_paused_collections_free_a_new_cycle_once_many_objects_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_module, "_NEW_OBJECTS", 2_000)
    with PausedCollections() as garbage:
        gc.collect()
        lost = weakref.ref(Knot())
        garbage.collect()
        assert lost() is not None
        kept: list[list[int]] = [[] for _ in range(3_000)]
        garbage.collect()
        assert lost() is None
    assert len(kept) == 3_000


def test_paused_collections_free_an_old_cycle_once_there_are_many_more_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal_module, "_NEW_OBJECTS", 2_000)
    monkeypatch.setattr(terminal_module, "_MORE_OBJECTS", 8_000)
    with PausedCollections() as garbage:
        gc.collect()
        knot = Knot()
        old, kept = weakref.ref(knot), [[0] for _ in range(3_000)]
        garbage.collect()  # it is among the objects that were left
        del knot
        kept += [[0] for _ in range(3_000)]
        garbage.collect()
        assert old() is not None
        kept += [[0] for _ in range(3_000)]
        garbage.collect()
        assert old() is None
