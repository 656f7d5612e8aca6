"""An executor without a device: it advances a virtual clock by the cost of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from quire.simulator.clock import VirtualClock
from quire.simulator.cost import Cost
from quire.simulator.transfers import DEFAULT_TRANSFER_COST, SimulatedTransfers, TransferCost
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import FoundFile, TransferReport

Model = Callable[[StepPlan], StepResult]


def sample_zeros(plan: StepPlan) -> StepResult:
    """Act as a model that samples token 0 for every row."""
    return StepResult(plan.step, np.zeros(len(plan.sample_rows), dtype=np.int32))


class SimulatedExecutor:
    """Runs steps one after the other; each takes the seconds of its cost. `collect` moves the clock to the end of a
    step."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: Cost,
        model: Model = sample_zeros,
        depth: int = 1,
        transfer_cost: TransferCost = DEFAULT_TRANSFER_COST,
        files: tuple[FoundFile, ...] = (),
    ) -> None:
        self.depth = depth
        self._clock, self._cost, self._model = clock, cost, model
        self._transfers = SimulatedTransfers(clock, transfer_cost, files)
        self._in_flight: deque[tuple[float, StepResult]] = deque()  # (time at which the step ends, its result)
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> None:
        self._transfers.submit(plan.transfers)
        seconds = self._cost.seconds(plan) if plan.num_tokens else 0.0
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._in_flight.append((self._free_at, self._model(plan)))

    def supply_masks(self, masks: Masks | None) -> None:
        """Do nothing: the model's tokens are recorded, so masks change nothing."""

    def collect(self) -> StepResult:
        end, result = self._in_flight.popleft()
        self._clock.move_to(end)
        return result

    def transfers(self) -> TransferReport:
        return self._transfers.report()

    def next_transfer(self) -> float | None:
        """Return the moment at which the next transfer completes; None: no transfer is pending."""
        return self._transfers.next_completion()

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        """Refuse: a replay knows only the adapters in its recording."""
        raise InvalidRequest("lora_path", f"{folder!r} cannot be read in a replay, as {name!r}", "record it")

    def forget_adapter(self, digest: str) -> None:
        """Do nothing: no adapter is stored."""

    def close(self) -> None:
        self._in_flight.clear()
