"""Watches the ranks of an engine in a thread, and kills all of them when one fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from quire.runtime.executor.fault_finder import Fault, FaultFinder, describe
from quire.runtime.executor.links import Rank, RankLauncher
from quire.types.errors import EngineDead

logger = logging.getLogger("quire.runtime")

_TICK_SECONDS = 0.05
_STARVED_SECONDS = 0.5  # between two examinations of the ranks
_FAULT_SECONDS = 5.0  # from a broken channel to the fault


class RankWatch:
    """Starts ranks in a thread and watches them until `stop`, or until one of them fails: then all are killed, and
    `fault` names the reason. Ranks that are processes die with that thread."""

    def __init__(self, launcher: RankLauncher, timeout: float, load_timeout: float) -> None:
        """`timeout`: seconds without progress after which a rank that others wait for has failed. `load_timeout`: the
        same for a rank that loads the model."""
        self._launcher, self._timeout, self._load_timeout = launcher, timeout, load_timeout
        self.fault: Fault | None = None
        self._reported: Fault | None = None
        self._ranks: Sequence[Rank] = ()
        self._failure: BaseException | None = None  # the error of starting them
        self._started, self._failed, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._paused = threading.Event()
        self._finder: FaultFinder | None = None  # set when the ranks have started
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()

    def ranks(self) -> Sequence[Rank]:
        """Wait until the ranks have started, and return them. Raises what starting them raised."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self._ranks

    def wait_for_fault(self) -> Fault:
        """Wait for the fault that explains a broken channel."""
        self._failed.wait(_FAULT_SECONDS)
        return self.fault or Fault("a rank closed its channel")

    def report_failure(self, rank: Rank, what: str) -> None:
        """Report that a rank has failed, such as "did not answer". The watch thread then kills all ranks."""
        self._reported = Fault(f"{describe(rank)} {what}")

    def dead_engine_error(self) -> EngineDead:
        """Wait for the fault, and return the error of an engine whose ranks are gone."""
        return EngineDead(self.wait_for_fault().reason)

    def pause(self) -> None:
        """Stop examining the ranks, as they are about to end."""
        self._paused.set()

    def stop(self) -> None:
        """End the thread, and with it ranks that still run. Idempotent."""
        self._stopping.set()
        self._thread.join()

    # -------------------------------------------------------------------------------------------------------- looking
    def _run(self) -> None:
        try:
            self._ranks = self._launcher.start()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits in `ranks`
            self._failure = error
            return
        finally:
            self._started.set()
        try:
            self._watch()
        finally:
            self._stopping.wait()  # child processes die with the thread that started them
            self._launcher.close()

    def _watch(self) -> None:
        last = time.monotonic()
        self._finder = finder = FaultFinder(self._ranks, self._timeout, self._load_timeout, last)
        while not self._stopping.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - last > _STARVED_SECONDS:  # this process was stopped or starved, and saw nothing
                finder.reset_timeouts(now)
            last = now
            try:
                fault = None if self._paused.is_set() else self._reported or finder.examine(now)
            except Exception as error:  # noqa: BLE001 - without this thread, nothing would kill the ranks
                fault = Fault(f"the ranks could not be watched any more: {error!r:.500}")
            if fault is not None:
                self._give_up(fault)
                return

    def _give_up(self, fault: Fault) -> None:
        self.fault = fault
        self._failed.set()  # the engine need not wait for the ranks to end
        for rank in self._ranks:
            try:
                rank.kill()
            except Exception:
                logger.exception("%s could not be ended", describe(rank))
