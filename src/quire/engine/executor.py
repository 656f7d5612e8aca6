"""The protocol between the engine and the runtime. The engine knows nothing else about devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from quire.types.adapters import AdapterInfo
from quire.types.standby import WeightUpdate
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import TransferReport


class Executor(Protocol):
    """Runs plans in the order in which they are launched. Results are collected in the same order."""

    @property
    def depth(self) -> int:
        """How many steps the engine should keep in flight. 1 on a CPU."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step. May return before it has run. A guided plan runs up to its sampling, which waits for masks.

        Raises EngineDead if the workers are gone.
        """

    def supply_masks(self, masks: Masks | None) -> None:
        """Supply the masks of the last launched plan, which is guided, and start its sampling. None: no sample has a
        mask.

        Called exactly once for each guided plan, before the next `launch` and before the plan is collected. A sample
        without a mask may choose any token.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. An exception here is fatal to the engine."""

    def transfers(self) -> TransferReport:
        """Return which transfers of launched plans have completed or failed since the last call. Never waits."""

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        """Read and check a LoRA adapter, and keep it in host memory. May be called from any thread. Raises
        InvalidRequest if it does not fit the model."""

    def forget_adapter(self, digest: str) -> None:
        """Drop an adapter that no live row uses. Its slot on the device is free."""

    def close(self) -> None:
        """Release devices and processes. Idempotent."""


@runtime_checkable
class PreparesMore(Protocol):
    """An executor that can do work for later steps ahead of time, while there are no requests."""

    def prepare_more(self) -> float | None:
        """Do a small part of the work. Called between steps, with none in flight. Returns the seconds after which there
        may be more to do; None: nothing is left. Never raises."""

    def compile_remaining(self) -> None:
        """Start all remaining compilations in the background, for engines that never call `prepare_more`."""


@runtime_checkable
class SleepingExecutor(Protocol):
    """An executor that can give back memory and replace its weights. All methods are called with no step in flight."""

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Give back the memory of "weights" or "kv_cache". Level 1 keeps the weights in host memory, level 2 drops
        them. Raises QuireError, and changes nothing."""

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take the memory of "weights" or "kv_cache" again; the cache is empty. Raises QuireError, and takes nothing,
        if there is not enough."""

    def check_weights(self, update: WeightUpdate) -> bool:
        """Open and check new weights for `apply_weights`. Returns whether they are all that the model has. Raises
        InvalidRequest; nothing has changed then."""

    def apply_weights(self) -> bool:
        """Replace the weights by those that were checked. Returns whether those of a drafter are older now. If this
        raises, the model must not be run before all its weights were replaced."""
