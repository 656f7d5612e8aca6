"""A linear model of how long a step takes, fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.types.step import StepPlan

_OUTLIER = 6.0  # the fit leaves out steps with more than this multiple of the median error


class StepSize(NamedTuple):
    """The work of a step and the time it took."""

    prompt_tokens: int
    decode_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per step, per token of a chunk, and per decode row."""

    step: float
    token: float
    row: float

    def seconds(self, plan: StepPlan) -> float:
        prompt = sum(chunk.num_tokens for chunk in plan.chunks)
        return self.step + self.token * prompt + self.row * len(plan.decode_rows)


class Fit(NamedTuple):
    """A fitted cost. `error` is the sum of absolute errors over all steps, outliers included, divided by the sum of
    their seconds."""

    cost: Cost
    num_used: int  # steps without outliers
    num_steps: int
    error: float


def fit_cost(steps: Sequence[StepSize]) -> Fit:
    """Fit a cost with non-negative coefficients by least squares. Outliers, such as the first step, are left out."""
    if not steps:
        return Fit(Cost(1e-3, 0.0, 0.0), 0, 0, 0.0)
    table = np.array(steps, dtype=np.float64)  # [steps, 3]
    prices = _solve(table)
    errors = np.abs(_predict(table, prices) - table[:, 2])
    spread = float(np.median(errors))
    near = table[errors <= _OUTLIER * spread + 1e-9]
    used = near if len(near) > 3 else table
    prices = _solve(used)
    error = float(np.abs(_predict(table, prices) - table[:, 2]).sum() / max(table[:, 2].sum(), 1e-12))
    return Fit(Cost(*(float(price) for price in prices)), len(used), len(table), error)


def _predict(table: npt.NDArray[np.float64], prices: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    predicted: npt.NDArray[np.float64] = prices[0] + table[:, :2] @ prices[1:]
    return predicted


def _solve(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Solve least squares. A column that is constant, or whose coefficient would be negative, gets the coefficient
    0."""
    columns = np.column_stack([np.ones(len(table)), table[:, :2]])
    used = [0, *(place for place in (1, 2) if np.ptp(columns[:, place]) > 0)]
    while True:
        found = np.linalg.lstsq(columns[:, used], table[:, 2], rcond=None)[0]
        if found.min() >= 0 or len(used) == 1:
            break
        used.remove(used[int(np.argmin(found))])
    prices = np.zeros(3)
    prices[used] = np.maximum(found, 0.0)
    return prices
