"""The standby states of an engine: paused, asleep, and with weights that were replaced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.types.errors import InvalidRequest

PauseMode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
Action = Literal["pause", "resume", "sleep", "wake_up", "update_weights", "abort", "state"]

TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
ENGINE_FIELD = "engine"  # the field of an InvalidRequest that is about the engine's state, not about the request


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Where new weights come from: a folder or file of a model, or tensors by their checkpoint names, as (name, tensor)
    pairs. Neither: the files from which the model was loaded."""

    path: str | None = None
    tensors: Any = None
    is_partial: bool = False  # `path` is a safetensors file that holds some of the model's tensors


@dataclass(frozen=True, slots=True)
class Command:
    """What an operator asks of the engine. Other fields than those of its action have their defaults."""

    action: Action
    mode: PauseMode = "abort"  # pause, sleep, update_weights: what happens to live requests
    clears_cache: bool = True  # pause
    level: int = 1  # sleep
    tags: tuple[Tag, ...] = TAGS  # sleep, wake_up
    update: WeightUpdate = WeightUpdate()  # update_weights
    version: str | None = None  # update_weights: the name of the new weights; None: the next number
    requests: tuple[str, ...] | None = None  # abort: their ids; None: all


@dataclass(frozen=True, slots=True)
class StandbyState:
    """What the engine's requests may expect. `asleep`: the kinds of memory that were given back."""

    is_paused: bool = False
    sleep_level: int = 0  # 0: awake
    asleep: tuple[Tag, ...] = ()
    has_weights: bool = True  # False: they were dropped, or an update failed half way
    weight_version: str = "default"
    num_ended: int = 0  # requests that the last command has ended
    has_old_drafter: bool = False  # the drafter has older weights than the model: its drafts are accepted less often

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    @property
    def refusal(self) -> InvalidRequest | None:
        """Why new requests are refused, or None."""
        if self.asleep:
            reason = f"is asleep: its {' and '.join(self.asleep)} were given back"
            return InvalidRequest(ENGINE_FIELD, reason, "wake it up first (wake_up, or POST /wake_up)")
        if not self.has_weights:
            fix = "load weights first (update_weights_from_disk, or POST /update_weights_from_disk)"
            return InvalidRequest(ENGINE_FIELD, "has no weights", fix)
        return None


AWAKE = StandbyState()


def check_command(command: Command) -> Command:
    """Return the command with its tags in order. Raises InvalidRequest naming the field."""
    if command.mode not in MODES:
        raise InvalidRequest("mode", f"{command.mode!r:.40} is unknown", f"use one of {', '.join(MODES)}")
    if command.level not in (1, 2):
        raise InvalidRequest("level", f"{command.level!r:.40} is not a sleep level", "use 1 or 2")
    if unknown := [tag for tag in command.tags if tag not in TAGS]:
        raise InvalidRequest("tags", f"{unknown[0]!r:.40} is unknown", f"use {' and '.join(TAGS)}")
    if not command.tags:
        raise InvalidRequest("tags", "are empty", "leave them out to name both")
    return replace(command, tags=tuple(tag for tag in TAGS if tag in command.tags))
