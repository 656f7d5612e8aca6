"""The executor of an engine with several ranks, each of which is a process with one worker."""

from __future__ import annotations

import contextlib
import gc
import logging
import selectors
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from quire.config.engine import DeviceConfig, EngineConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.sizes import format_size
from quire.runtime.executor.channel import Kind, Message
from quire.runtime.executor.codec import FINGERPRINT, Buffer, decode, encode
from quire.runtime.executor.fault_finder import describe
from quire.runtime.executor.links import Rank, RankLauncher
from quire.runtime.executor.plan_codec import PlanEncoder
from quire.runtime.executor.rank_messages import RankMessages
from quire.runtime.executor.transfers import TransferMerger
from quire.runtime.executor.watch import RankWatch
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.progress import Progress
from quire.runtime.parallel.results import merge_results
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.standby import WeightUpdate
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, TransferReport

logger = logging.getLogger("quire.runtime")

_DEPTHS = {"cpu": 1, "cuda": 2}
_EXIT_SECONDS = 5.0  # for ranks to finish their writes to disk and their step
_CALL_SECONDS = 300.0  # for a rank to read an adapter, even from a slow disk
_COLLECTIVE_FACTOR = 2.0  # a rank's own timeout is longer, so that the watch names the rank that is behind first


class RankConfig(Protocol):
    """What starting ranks needs of a configuration."""

    @property
    def device(self) -> DeviceConfig: ...

    @property
    def parallel(self) -> ParallelConfig: ...


class Job(Protocol):
    """What all ranks load, and how they are started."""

    @property
    def config(self) -> RankConfig: ...

    @property
    def has_tiers(self) -> bool: ...

    def message(self, rank: Rank, depth: int) -> bytes:
        """Return the first message to a rank."""


def start_fields(rank: Rank, parallel: ParallelConfig) -> dict[str, object]:
    """Return what the first message to every rank says."""
    return {
        "fingerprint": FINGERPRINT,
        "rank": rank.place.rank,
        "device_index": rank.device_index,
        "seconds": parallel.rank_timeout * _COLLECTIVE_FACTOR,
    }


@dataclass(frozen=True, slots=True)
class RankJob:
    """Implements Job for ranks that execute the plans of an engine."""

    files: ModelFiles
    model: ModelConfig
    config: EngineConfig
    load_format: Literal["auto", "dummy"] = "auto"
    draft_files: ModelFiles | None = None

    @property
    def has_tiers(self) -> bool:
        return self.config.cache.tiers.enabled

    def message(self, rank: Rank, depth: int) -> bytes:
        return encode(
            start_fields(rank, self.config.parallel)
            | {
                "depth": depth,
                "files": self.files,
                "model": self.model,
                "config": self.config,
                "load_format": self.load_format,
                "draft_files": self.draft_files,
            }
        )


class RankedExecutor:
    """Implements engine.executor.Executor. Sends every plan to all ranks, and collects the results of the ranks of
    the last stage. When a rank fails, all others are killed, and every later call raises EngineDead, which names the
    rank."""

    def __init__(
        self, job: Job, launcher: RankLauncher, *, progress: Progress | None = None, depth: int | None = None
    ) -> None:
        parallel = job.config.parallel
        self.depth = depth or _DEPTHS[job.config.device.device.partition(":")[0]]
        self._has_tiers = job.has_tiers
        self._encoder, self._transfers = PlanEncoder(), TransferMerger(parallel.num_ranks)
        self._calling = threading.Lock()
        self._closed = self._has_loaded = self._waits_for_masks = False
        self._level = 1  # of the last sleep
        self._num_launched = 0  # steps not collected yet
        self._unreported = 0  # ranks that were asked for their transfer reports and have not answered
        self._watch = RankWatch(launcher, parallel.rank_timeout, parallel.load_timeout)
        self._ranks: Sequence[Rank] = ()
        self.num_bytes: dict[int, tuple[int, int]] = {}  # by rank: bytes of its weights and of its KV cache
        self._messages = RankMessages((), self._watch, None)
        try:
            self._ranks = self._watch.ranks()
            self._messages = RankMessages(self._ranks, self._watch, launcher.rings)
            self._load(job, progress)
            self._has_loaded = True
        except BaseException:
            self.close()
            raise
        gc.collect()
        gc.freeze()  # current objects live on: garbage collections while serving skip them

    @property
    def ranks(self) -> Sequence[Rank]:
        return self._ranks

    # ------------------------------------------------------------------------------------------------------- loading
    def _load(self, job: Job, progress: Progress | None) -> None:
        """Wait until all ranks have loaded. Raises what a rank raised, or EngineDead if a rank ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.control, selectors.EVENT_READ, rank)
            try:
                for rank in self._ranks:
                    rank.control.send(Kind.START, job.message(rank, self.depth))
                while selector.get_map():
                    for key, _ in selector.select():
                        rank = key.data
                        if self._handle_loading(rank, progress):
                            selector.unregister(rank.control)
            except (EOFError, OSError):
                fault = self._watch.wait_for_fault()
                raise fault.error or EngineDead(fault.reason) from None

    def _handle_loading(self, rank: Rank, progress: Progress | None) -> bool:
        """Handle the messages of a rank that loads. Returns whether it has loaded."""
        while (message := rank.control.receive(wait=False)) is not None:
            if message.kind is Kind.READY:
                weights, cache = self.num_bytes[rank.place.rank] = decode(message.data)
                sizes = format_size(weights), format_size(cache)
                logger.info("%s has loaded: weights %s, KV cache %s", describe(rank), *sizes)
                return True
            assert message.kind is Kind.PROGRESS
            if progress is not None:
                progress(*decode(message.data))
        return False

    # --------------------------------------------------------------------------------------------------------- steps
    def launch(self, plan: StepPlan) -> None:
        if self._transfers.orphans:
            plan = self._drop_orphans(plan)
        self._messages.send(Kind.PLAN, self._encoder.encode(plan))
        self._waits_for_masks = plan.guided
        self._num_launched += 1

    def supply_masks(self, masks: Masks | None) -> None:
        self._messages.send(Kind.MASKS, encode(masks))
        self._waits_for_masks = False

    def collect(self) -> StepResult:
        if self._waits_for_masks and self._num_launched == 1:
            raise RuntimeError("the step to collect waits for its masks: supply them first")
        self._num_launched -= 1
        return merge_results([decode(data) for data in self._messages.receive_results()])

    def exchange(self, kind: Kind, payload: Buffer) -> list[Buffer]:
        """Send a message to all ranks, and wait for the result of each."""
        self._messages.send(kind, payload)
        return self._messages.receive_results()

    # --------------------------------------------------------------------------------------------------------- tiers
    def transfers(self) -> TransferReport:
        """Ask ranks for their reports, and return what has completed since the last call."""
        if not self._has_tiers or self._closed:
            return NOTHING_MOVED
        for number in range(len(self._ranks)):
            for message in self._messages.take_all(number, Kind.TRANSFERS):
                self._transfers.add(number, decode(message.data))
                self._unreported -= 1
        if not self._unreported:
            self._messages.send(Kind.REPORT)
            self._unreported = len(self._ranks)
        return self._transfers.take()

    def _drop_orphans(self, plan: StepPlan) -> StepPlan:
        """Return the plan, which now also deletes orphans: files of which not all ranks have their part. Keys that the
        plan stores now are skipped."""
        orphans, self._transfers.orphans = self._transfers.orphans, []
        stored = {move.key for move in plan.transfers.stores}
        drops = plan.transfers.drops + tuple(key for key in dict.fromkeys(orphans) if key not in stored)
        return replace(plan, transfers=replace(plan.transfers, drops=drops))

    # ------------------------------------------------------------------------------------------------------ adapters
    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        infos: list[AdapterInfo] = self._call(Kind.READ_ADAPTER, (name, folder))
        return infos[0]

    def forget_adapter(self, digest: str) -> None:
        self._call(Kind.FORGET_ADAPTER, (digest,))

    # ------------------------------------------------------------------------------------------- SleepingExecutor
    def sleep(self, level: int, tags: Sequence[str]) -> None:
        try:
            self._call(Kind.STANDBY, ("sleep", level, tuple(tags)))
        except EngineDead:
            raise
        except QuireError:
            self._call(Kind.STANDBY, ("wake_up", tuple(tags)))  # the ranks that did sleep
            raise
        self._level = level

    def wake_up(self, tags: Sequence[str]) -> None:
        try:
            self._call(Kind.STANDBY, ("wake_up", tuple(tags)))
        except EngineDead:
            raise
        except QuireError:
            self._call(Kind.STANDBY, ("sleep", self._level, tuple(tags)))  # the ranks that did wake up
            raise

    def check_weights(self, update: WeightUpdate) -> bool:
        if update.tensors is None:
            return all(self._call(Kind.STANDBY, ("check_weights", update.path, update.is_partial)))
        from quire.runtime.loading.new_weights import save_tensors

        with tempfile.TemporaryDirectory(prefix="quire-weights-") as folder:
            path = Path(folder) / "some.safetensors"
            save_tensors(update.tensors, path)
            found = self._call(Kind.STANDBY, ("check_weights", str(path), True))  # each rank maps the file
        return all(found)

    def apply_weights(self) -> bool:
        return any(self._call(Kind.STANDBY, ("apply_weights",)))

    def _call(self, kind: Kind, arguments: tuple[object, ...]) -> list[Any]:
        """Send a call to all ranks, and return their answers. Raises InvalidRequest if a rank refuses, and EngineDead
        if a rank does not answer in time."""
        self._messages.check_open()
        payload = encode(arguments)
        with self._calling:
            try:
                for rank in self._ranks:
                    rank.calls.send(kind, payload)
                deadline = time.monotonic() + _CALL_SECONDS
                messages = [self._wait_for_answer(rank, deadline) for rank in self._ranks]
            except (EOFError, OSError):
                raise self._watch.dead_engine_error() from None
        answers = [(message.kind, decode(message.data)) for message in messages]
        for answer, value in answers:
            if answer is Kind.REFUSED:
                raise InvalidRequest(*value) if value[0] else QuireError(value[1])
        return [value for _, value in answers]

    def _wait_for_answer(self, rank: Rank, deadline: float) -> Message:
        """Wait for a rank's answer. Raises EOFError if the rank is gone. A rank that does not answer by the deadline is
        reported to the watch, which kills all ranks."""
        with selectors.DefaultSelector() as selector:
            selector.register(rank.calls, selectors.EVENT_READ)
            while (message := rank.calls.receive(wait=False)) is None:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    reason = f"did not answer within {_CALL_SECONDS:g} s to a call about adapters, sleep or weights"
                    self._watch.report_failure(rank, reason)
                    raise EOFError
        return message

    # ----------------------------------------------------------------------------------------------------------- end
    def check(self) -> None:
        """Run all checks on every rank. Waits for the devices."""
        if self._closed:
            return
        self._messages.send(Kind.CHECK)
        for number, rank in enumerate(self._ranks):
            wrong = decode(self._messages.receive(number, Kind.CHECKED).data)
            assert not wrong, f"{describe(rank)}: {wrong}"

    def close(self) -> None:
        """End all ranks. They may finish writes to disk for a few seconds before they are killed."""
        if self._closed:
            return
        self._closed = True
        self._watch.pause()
        with contextlib.ExitStack() as at_end:  # all callbacks run, even if one of them raises
            at_end.callback(gc.unfreeze)
            at_end.callback(self._watch.stop)
            for rank in self._ranks:
                at_end.callback(rank.close)
            if not self._has_loaded:
                self._kill_all()
            self._messages.send_stop()  # a rank that does not read it is killed below
            self._messages.close()
            deadline = time.monotonic() + _EXIT_SECONDS
            while time.monotonic() < deadline and any(rank.ending() is None for rank in self._ranks):
                time.sleep(0.005)
            self._kill_all()  # kill all before waiting for any

    def _kill_all(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(Exception):
                rank.kill()
