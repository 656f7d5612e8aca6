"""Rarely used filters: typical_p, top_a, top_n_sigma and XTC, and dynamic temperature. They see the logits before the
temperature, as in llama.cpp, and greedy rows are no members."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.rng import Streams
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.temperature import COLDEST
from quire.runtime.sampling.transforms.transform import Step
from quire.types.extra_samplers import ExtraSamplers
from quire.types.step import NewRow

_INTERVALS_PER_UNIT, _MOST_INTERVALS = 256, 4_095  # of distances
_XTC_STREAM = 0x5854_4300  # distinguishes XTC's random numbers from those that draw tokens


def _asked(new: NewRow) -> ExtraSamplers | None:
    return None if new.sampling.is_greedy else new.sampling.samplers


def _drop(logits: Tensor, part: Part, mine: Tensor, dropped: Tensor) -> None:
    mine.masked_fill_(dropped, float("-inf"))
    part.put(logits, mine)


class TopNSigma:
    """Drops tokens whose logit is more than n standard deviations of the row's finite logits below the highest."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._sigmas = Column(torch.float64, device, pad=0.0)

    def add(self, new: NewRow) -> None:
        extra = _asked(new)
        if extra is not None and extra.top_n_sigma > 0.0:
            self._sigmas.put(self.members.join(new.row), [extra.top_n_sigma])

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        mine = part.take(logits)
        finite, values = mine > float("-inf"), mine.double()
        count = finite.sum(dim=-1, keepdim=True)
        mean = torch.where(finite, values, 0.0).sum(dim=-1, keepdim=True) / count
        spread = (torch.where(finite, values - mean, 0.0).square().sum(dim=-1, keepdim=True) / count).sqrt()
        cut = values.amax(dim=-1, keepdim=True) - self._sigmas.scalars(part.slots)[:, None] * spread
        _drop(logits, part, mine, values < cut)


class TopA:
    """Drops tokens whose probability is below top_a times the square of the highest one."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._log_top_a = Column(torch.float64, device, pad=0.0)

    def add(self, new: NewRow) -> None:
        extra = _asked(new)
        if extra is not None and extra.top_a > 0.0:
            self._log_top_a.put(self.members.join(new.row), [math.log(extra.top_a)])

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        mine = part.take(logits)
        logprobs = mine.double().log_softmax(dim=-1)
        cut = self._log_top_a.scalars(part.slots)[:, None] + 2 * logprobs.amax(dim=-1, keepdim=True)
        _drop(logits, part, mine, logprobs < cut)


def _surprise(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of tokens, float64, and how far their surprise is from the entropy: infinitely for
    banned ones."""
    logprobs = logits.double().log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum(dim=-1, keepdim=True)
    return probabilities, (-logprobs - entropy).abs()


def keep_typical(logits: Tensor, mass: float) -> None:  # [vocab]
    """Do to one row on a CPU what TypicalP says. Tokens are sorted only within the interval of distances in which the
    mass is reached."""
    probabilities, distance = (each.numpy() for each in _surprise(logits))
    near = np.fmin(distance * _INTERVALS_PER_UNIT, _MOST_INTERVALS).astype(np.int64)
    reached = np.bincount(near, weights=probabilities).cumsum()
    interval = int(np.searchsorted(reached, mass))
    if interval == len(reached):
        return
    inside = np.flatnonzero(near == interval)
    inside = inside[np.argsort(distance[inside], kind="stable")]
    before = reached[interval - 1] if interval else 0.0
    last = int(np.searchsorted(before + probabilities[inside].cumsum(), mass))
    cut = distance[inside[min(last, len(inside) - 1)]]
    logits.masked_fill_(torch.from_numpy(distance > cut), float("-inf"))


class TypicalP:
    """Locally typical sampling: keeps the tokens whose surprise (-log p) is nearest to the row's entropy, as few as
    have this probability together, and drops the rest. Of equally near tokens none is dropped before another."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._mass = Column(torch.float64, device, pad=1.0)

    def add(self, new: NewRow) -> None:
        extra = _asked(new)
        if extra is not None and extra.typical_p < 1.0:
            self._mass.put(self.members.join(new.row), [extra.typical_p])

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        if logits.device.type == "cpu":
            for sample, mass in zip(part.host_positions.tolist(), self._mass.scalars(part.slots).tolist(), strict=True):
                keep_typical(logits[sample], mass)
            return
        mine = part.take(logits)
        probabilities, distance = _surprise(mine)
        ordered, ids = distance.sort(dim=-1, stable=True)
        reached = probabilities.gather(1, ids).cumsum(dim=-1)
        last = (reached < self._mass.scalars(part.slots)[:, None]).sum(dim=-1, keepdim=True)
        cut = ordered.gather(1, last.clamp(max=mine.shape[1] - 1))
        _drop(logits, part, mine, distance > cut)


class Xtc:
    """Exclude top choices: with `xtc_probability`, drops all tokens whose probability is at least `xtc_threshold`
    except the least probable of them.

    Whether it does so is decided for each token from the row's seed and the place of the token in its answer.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._values = Column(torch.float64, device, pad=0.0)  # probability, log of the threshold
        self._streams = Streams(num_rows, device)

    def add(self, new: NewRow) -> None:
        extra = _asked(new)
        if extra is None or not extra.xtc_probability > 0.0 or extra.xtc_threshold > 0.5:
            return  # at most one token is more probable than 0.5
        threshold = math.log(extra.xtc_threshold) if extra.xtc_threshold > 0.0 else -math.inf
        self._values.put(self.members.join(new.row), [extra.xtc_probability, threshold])
        self._streams.put(new.row, new.seed ^ _XTC_STREAM, new.sample_index)

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        mine, values = part.take(logits), self._values.take(part.slots)
        logprobs = mine.double().log_softmax(dim=-1)
        is_top = (logprobs >= values[:, 1:2]) & (mine > float("-inf"))
        least = torch.where(is_top, logprobs, float("inf")).amin(dim=-1, keepdim=True)
        ids = torch.arange(mine.shape[1], device=mine.device)
        kept = torch.where(is_top & (logprobs == least), ids, -1).amax(dim=-1, keepdim=True)
        happens = self._streams.uniform(part.rows, step.num_outputs(part)) < values[:, 0]
        _drop(logits, part, mine, is_top & (ids != kept) & happens[:, None])


class DynamicTemperature:
    """Makes the temperature depend on the entropy of the row: from `temperature - range` where one token is certain to
    `temperature + range` where all are equally probable.

    The logits are scaled so that the temperature, which divides them later, has this effect.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._values = Column(torch.float64, device, pad=1.0)  # temperature, lowest, highest, exponent

    def add(self, new: NewRow) -> None:
        extra = _asked(new)
        if extra is None or not extra.dynatemp_range > 0.0:
            return
        temperature, spread = max(new.sampling.temperature, COLDEST), extra.dynatemp_range
        values = [temperature, max(0.0, temperature - spread), temperature + spread, extra.dynatemp_exponent]
        self._values.put(self.members.join(new.row), values)

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        mine = part.take(logits)
        temperature, lowest, highest, exponent = self._values.take(part.slots)[:, :4].unbind(dim=-1)
        logprobs = mine.double().log_softmax(dim=-1)
        probabilities = logprobs.exp()
        entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum(dim=-1)
        count = (mine > float("-inf")).sum(dim=-1)
        share = (entropy / count.double().log()).clamp(0.0, 1.0)  # NaN with one token, whatever the temperature
        chosen = (lowest + (highest - lowest) * share**exponent).clamp(min=COLDEST)
        scale = torch.where(count > 1, temperature / chosen, 1.0)
        mine.copy_((mine.double() * scale[:, None]).clamp(max=torch.finfo(torch.float32).max))
        part.put(logits, mine)
