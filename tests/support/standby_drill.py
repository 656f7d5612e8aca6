"""Commands about a whole engine at random moments: it is paused, sleeps, and loads its own weights again."""

from __future__ import annotations

import random
from collections import Counter

from quire.engine.core import EngineCore
from quire.engine.executor import SleepingExecutor
from quire.types.errors import QuireError
from quire.types.standby import Command, StandbyState, WeightUpdate

_LONGEST = 6  # turns for which the engine stays away


class StandbyDrill:
    """Calls `Standby` between the steps of an engine. No command changes an answer, and none ends a request."""

    def __init__(self, core: EngineCore, rng: random.Random, chance: float) -> None:
        self._core, self._rng, self._chance = core, rng, chance
        self._back: Command | None = None  # what brings the engine back
        self._turns = 0
        self.met: Counter[str] = Counter()

    @property
    def is_away(self) -> bool:
        """Whether a command has to be followed by another one, or waits."""
        return self._back is not None or self._core.standby.is_active

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused."""
        return self._core.standby.refuses

    def turn(self) -> None:
        """Begin a command now and then, and bring an engine that is away back after some turns."""
        self._core.standby.advance()
        if self._back is not None:
            self._turns -= 1
            if self._turns <= 0:
                back, self._back = self._back, None
                self._do(back, is_required=True)
        elif self._rng.random() < self._chance:
            mode = self._rng.choice(["keep", "keep", "wait"])
            sleeps = ["sleep", "update_weights", "drop"] if isinstance(self._core.executor, SleepingExecutor) else []
            action = self._rng.choice(["pause", *sleeps])
            self._turns = self._rng.randint(1, _LONGEST)
            if action == "pause":
                self._do(Command("pause", mode=mode))  # type: ignore[arg-type]
                self._back = Command("resume")
            elif action == "sleep":
                tags = self._rng.choice([("weights", "kv_cache"), ("kv_cache",), ("weights",)])
                self._do(Command("sleep", mode=mode, tags=tags))  # type: ignore[arg-type]
                self._back = Command("wake_up")
            elif action == "update_weights":
                self._do(Command("update_weights", mode=mode, update=WeightUpdate()))  # type: ignore[arg-type]
            else:
                self._do(Command("sleep", mode=mode, level=2))  # type: ignore[arg-type]
                self._do(Command("wake_up"))
                self._do(Command("update_weights", mode="wait", update=WeightUpdate()))
        if self._core.standby.state.asleep and self._back is None and not self._core.standby._pending:
            self._back = Command("wake_up")

    def _do(self, command: Command, *, is_required: bool = False) -> None:
        def done(result: StandbyState | QuireError) -> None:
            if isinstance(result, QuireError):
                if is_required:
                    raise result
                self.met["refused commands"] += 1
            else:
                self.met[command.action] += 1

        self._core.standby.begin(command, done)
