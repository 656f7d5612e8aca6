"""Standby: pauses the engine, lets its executor give back memory, and puts new weights into it. Commands are carried
out one after the other, each when the requests that it ends or waits for have ended."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from quire.config.engine import CacheConfig
from quire.engine.decoding.grammar import Compilation
from quire.engine.decoding.group import Group
from quire.engine.executor import SleepingExecutor
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.preemption import Recompute
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.request import Abort
from quire.types.standby import AWAKE, TAGS, Command, PauseMode, StandbyState, Tag, WeightUpdate, check_command

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire.engine")

Result = StandbyState | QuireError
Done = Callable[[Result], None]


class _Held:
    """In the place of a compiled grammar: a request without one, which waits until the engine is resumed."""

    is_ready = True

    def matcher(self, rules: object) -> None:
        """Return no matcher: the request has no grammar."""


HELD: Compilation = _Held()  # type: ignore[assignment]


class LiveRequests(NamedTuple):
    """The core's live requests, those of them that were not handed to the scheduler, and the steps in flight."""

    groups: Mapping[str, Group]
    compiling: Sized
    in_flight: Sized

    @property
    def num_started(self) -> int:
        """The number of live requests, without those that wait for their grammar or for the engine to be resumed."""
        return len(self.groups) - len(self.compiling)


class _PendingCommand(NamedTuple):
    """A command that waits until its requests have ended."""

    command: Command
    done: Done
    num_ended: int
    is_all: bool | None  # whether checked weights are all that the model has; None: not checked


class Standby:
    """Carries out commands about the whole engine. `begin` takes one; `advance` must be called after each step."""

    def __init__(
        self, core: EngineCore, scheduler: Scheduler, live: LiveRequests, cache: CacheConfig, *, is_recorded: bool
    ) -> None:
        self._has_tiers = cache.tiers.enabled
        self._core, self._scheduler, self._live, self._is_recorded = core, scheduler, live, is_recorded
        self._namespace = scheduler.tree.namespace
        self._pending: deque[_PendingCommand] = deque()
        self._keeps = False  # paused with live requests, which continue when the engine is resumed
        self._naps = False  # asleep because it was idle; the next request wakes it up
        self._num_updates = 0
        self.state = AWAKE
        self.is_active = False  # a command is under way, or the engine is not as usual: then ask the methods below

    # ------------------------------------------------------------------------------------------ what the core asks
    @property
    def holds(self) -> bool:
        """Whether new requests wait."""
        return bool(self.state.is_paused or self._pending)

    @property
    def stops(self) -> bool:
        """Whether no step may be launched."""
        return self._is_stopped or (bool(self._pending) and self._mode(self._pending[0].command) == "keep")

    @property
    def _is_stopped(self) -> bool:
        """Whether the commands that were carried out let no step be launched."""
        return self._keeps or bool(self.state.asleep) or not self.state.has_weights

    def _mode(self, command: Command) -> PauseMode:
        """Return what happens to live requests. Those that cannot run now would never end: `wait` keeps them."""
        never_end = command.mode == "wait" and self._is_stopped and self._live.num_started > 0
        return "keep" if never_end else command.mode

    @property
    def refuses(self) -> bool:
        """Whether a new request would be refused: it does not wake the engine up."""
        return self.state.refusal is not None and not (self._naps and self.state.has_weights)

    @property
    def rests(self) -> bool:
        """Whether live requests give the engine nothing to do: they wait until it is resumed."""
        return (self.stops or self.holds) and self._is_drained("keep" if self.stops else "wait")

    def admit(self) -> None:
        """Wake up from a nap for a new request. Raises InvalidRequest if the engine takes none."""
        if self._naps and self.state.asleep:
            try:
                self._wake(TAGS)
            except EngineDead:
                raise
            except QuireError as error:
                raise InvalidRequest("engine", f"could not wake up: {error}", "try again later") from None
            logger.info("the engine woke up for a request")
            self.is_active = bool(self._pending) or self.state.is_paused or not self.state.has_weights
        if (refusal := self.state.refusal) is not None:
            raise refusal

    # --------------------------------------------------------------------------------------------------- commands
    def begin(self, command: Command, done: Done) -> None:
        """Take a command. `done` is called with the state after it, or with the error that refuses it."""
        core = self._core
        try:
            if core.dead is not None:
                raise EngineDead(core.dead)
            command = check_command(command)
            if command.action == "state":  # not after commands that wait
                done(replace(self.state, num_ended=0))
                return
            if command.action == "abort":  # nor is this
                done(replace(self.state, num_ended=self._abort(command.requests)))
                return
            self._check(command)
            is_first = command.action == "update_weights" and not self._pending
            is_all = self._check_weights(command) if is_first else None  # before any request is ended for it
            ended = self._abort(None) if command.mode == "abort" and _drains(command) else 0
        except QuireError as error:
            done(error)
            return
        self._pending.append(_PendingCommand(command, done, ended, is_all))
        self.is_active = True
        self.advance()

    def advance(self) -> None:
        """Carry out the commands whose time has come."""
        while self._pending:
            pending = self._pending[0]
            if pending.command.action == "pause" and pending.command.mode == "wait":
                self._keeps = False  # requests that another pause keeps finish too
            if (
                self._core.dead is None
                and _drains(pending.command)
                and not self._is_drained(self._mode(pending.command))
            ):
                return
            result: Result
            try:
                result = self._run(pending)
            except QuireError as error:
                result = error
            finally:
                self._pending.popleft()
                state = self.state
                self.is_active = bool(self._pending or state.is_paused or state.asleep) or not state.has_weights
            pending.done(result)

    @property
    def may_nap(self) -> bool:
        """Whether an idle engine may sleep: it is as usual, and has no pinned prefixes, which would be lost."""
        return not self.is_active and not len(self._core.pins) and self._core.dead is None

    def nap(self) -> None:
        """Sleep because the engine is idle, as `may_nap` allows. The next request or update of weights wakes it up."""
        self.begin(Command("sleep", mode="wait"), self._begin_nap)

    def _begin_nap(self, result: Result) -> None:
        self._naps = isinstance(result, StandbyState)
        if isinstance(result, StandbyState):
            logger.info("the engine sleeps, since it is idle; the next request wakes it up")
        else:
            logger.warning("the idle engine cannot sleep: %s", result)

    def _check(self, command: Command) -> None:
        """Refuse a command that cannot be carried out, before any request is ended for it."""
        if command.action == "resume":
            return
        if self._is_recorded:
            raise InvalidRequest("record", "is on, and a recording cannot hold this", "start the engine without it")
        if command.action == "pause":
            return
        if not isinstance(self._core.executor, SleepingExecutor):
            raise InvalidRequest("engine", "runs on an executor that cannot do this", "use another executor")
        if self._mode(command) == "keep" and self._has_tiers and command.action in ("sleep", "update_weights"):
            reason = "would keep live requests, which is not supported with host, disk or remote tiers"
            raise InvalidRequest("mode", reason, "use abort, or start the engine without tiers")

    def _run(self, pending: _PendingCommand) -> StandbyState:
        core, command = self._core, pending.command
        if core.dead is not None:
            raise EngineDead(core.dead)
        self._check(command)  # commands before it have changed what can be kept
        if command.action == "pause":
            self._keeps = self._mode(command) == "keep"
            if command.clears_cache and not self._keeps and not self.state.asleep:
                core.reset_cache()
            self.state = replace(self.state, is_paused=True)
        elif command.action == "resume":
            self._keeps, self.state = False, replace(self.state, is_paused=False)
        elif command.action == "sleep":
            self._sleep(command.level, command.tags)
        elif command.action == "wake_up":
            self._wake(command.tags)
        elif command.action == "update_weights":
            self._update(command, pending.is_all)
        return replace(self.state, num_ended=pending.num_ended)

    def _sleep(self, level: int, tags: tuple[Tag, ...]) -> None:
        executor, state = self._core.executor, self.state
        assert isinstance(executor, SleepingExecutor)
        self._naps = False
        gives = tuple(tag for tag in tags if tag not in state.asleep or level > state.sleep_level)
        if not gives:
            return
        drop_blocks(self._scheduler, with_tiers=False)
        executor.sleep(level, gives)
        has_weights = state.has_weights and (level == 1 or "weights" not in gives)
        asleep = tuple(tag for tag in TAGS if tag in gives or tag in state.asleep)
        self.state = replace(state, sleep_level=max(level, state.sleep_level), asleep=asleep, has_weights=has_weights)

    def _wake(self, tags: tuple[str, ...]) -> None:
        executor = self._core.executor
        assert isinstance(executor, SleepingExecutor)
        wanted = tuple(tag for tag in self.state.asleep if tag in tags)
        if wanted:
            executor.wake_up(wanted)
            rest = tuple(tag for tag in self.state.asleep if tag not in wanted)
            level = self.state.sleep_level if rest else 0
            self.state, self._naps = replace(self.state, asleep=rest, sleep_level=level), False

    def _check_weights(self, command: Command) -> bool:
        executor = self._core.executor
        assert isinstance(executor, SleepingExecutor)
        if self._naps:
            self._wake(TAGS)
        if "weights" in self.state.asleep:
            raise InvalidRequest("engine", "is asleep, and its weights too", 'wake them up first: tags=["weights"]')
        try:
            is_all = executor.check_weights(command.update)
        except QuireError:
            raise
        except Exception as error:  # of the caller's tensors, or of files: nothing has changed
            raise InvalidRequest("weights", f"cannot be read: {error!r:.300}", "check them") from error
        if not is_all and not self.state.has_weights:
            reason = "are not all that the model has, and those of the engine were dropped"
            raise InvalidRequest("weights", reason, "load a whole model first")
        return is_all

    def _update(self, command: Command, is_all: bool | None) -> None:
        """Replace weights. The prefix cache is emptied, and what kept requests have computed is computed again."""
        if is_all is None:
            self._check_weights(command)
        executor = self._core.executor
        assert isinstance(executor, SleepingExecutor)
        is_own = command.update == WeightUpdate()
        drop_blocks(self._scheduler, with_tiers=True)
        # The model's own files get another key too: they may have been written anew.
        self._scheduler.tree.namespace = self._namespace + secrets.token_bytes(16)
        self.state = replace(self.state, has_weights=False)
        try:
            is_old = executor.apply_weights()
        except EngineDead:
            raise
        except Exception as error:
            reason = f"the update failed half way: {error!r:.300}; load a whole model before the next request"
            raise QuireError(reason) from error
        self._num_updates += 1
        version = command.version or ("default" if is_own else str(self._num_updates))
        self.state = replace(self.state, has_weights=True, weight_version=version, has_old_drafter=is_old)
        if is_old:
            logger.warning("the drafter still has older weights: its drafts are accepted less often")

    def _is_drained(self, mode: PauseMode) -> bool:
        """Whether the requests that a command waits for have ended."""
        live = self._live
        if len(live.in_flight):
            return False
        return mode == "keep" or (live.num_started == 0 and not self._scheduler.tiers.has_transfers)

    def _abort(self, names: Iterable[str] | None) -> int:
        """Abort live requests: those with these ids, or all. Returns how many."""
        live = self._live.groups
        names = list(live) if names is None else [name for name in names if name in live]
        for name in names:
            self._core.abort(Abort(name))
        return len(names)


def _drains(command: Command) -> bool:
    return command.action in ("pause", "sleep", "update_weights")


def drop_blocks(scheduler: Scheduler, *, with_tiers: bool) -> None:
    """Forget all blocks on the device, pinned ones too, and with `with_tiers` those of all tiers. Running requests wait
    to be admitted again, and owe all their tokens. No step may be in flight."""
    builder, usual = PlanBuilder(0), scheduler.preemption
    scheduler.preemption = Recompute(scheduler.compute_time)
    for group in list(scheduler.running):
        scheduler.preempt(builder, group)
    scheduler.preemption = usual
    if with_tiers:
        scheduler.reset_cache()
    else:
        scheduler.reuse.reset()
        scheduler.pins.reset()
