"""The last step of sampling: from transformed logits to one token per row, by temperature, min_p, top_k and top_p.

If no token can be chosen for a row, its token id is a negative error code on the device, which costs no
synchronization. `row_failures` reads the codes when the ids are on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.sampling.choosers.chooser import Chooser
from quire.runtime.sampling.choosers.full import DrawFromAll
from quire.runtime.sampling.choosers.top_k import DrawFromTopK
from quire.runtime.sampling.choosers.top_p import DrawFromTopP
from quire.runtime.sampling.masking import apply_masks
from quire.runtime.sampling.rng import Streams
from quire.runtime.sampling.samples import Part, Samples, make_part
from quire.runtime.sampling.tiles import best_token, tile_max
from quire.runtime.sampling.transforms.min_p import MinP
from quire.runtime.sampling.transforms.temperature import Temperature
from quire.runtime.sampling.transforms.transform import Step, Transform
from quire.types.step import NO_ROWS, Ints, Masks, NewRow, RowFailure

NOT_FINITE = -1
NOTHING_ALLOWED = -2

_UNDER_A_MASK = "the grammar allows no token, or none that allowed_token_ids, bad_words and min_tokens leave"
_REASONS = {
    NOT_FINITE: "the model's logits are NaN or infinite; try dtype float32 or bfloat16, or check the weights",
    NOTHING_ALLOWED: "no token is left to choose; loosen allowed_token_ids, bad_words or min_tokens",
}
_LINES_AT_ONCE = 64  # rows drawn together; bounds the scratch memory to a few dozen bytes per token of their vocabulary


class Choice(Protocol):
    """Chooses tokens from logits. All implementations choose the same tokens if their exp rounds alike."""

    @property
    def takes_any_dtype(self) -> bool:
        """Whether `choose` and `mask` take logits of any dtype; else they take float32."""

    def add(self, new: NewRow) -> None:
        """Store the sampling parameters of a new row."""

    def remove(self, row: int) -> None:
        """Forget a row. Idempotent."""

    def prepare(self, rows: Ints) -> Any:
        """Return what `choose` needs for a batch of rows. Called when the rows or their parameters change."""

    def mask(self, logits: Tensor, masks: Masks, prepared: Any, samples: Samples) -> None:
        """Set the logits [S, vocab] of tokens that the masks of `samples` ban to -inf, and those of ids past the masks'
        last bit."""

    def forget_masks(self, rows: Ints) -> None:
        """Discard the masks kept for these rows. Other ranks may have been given newer ones, so `Masks.changed` does
        not compare the next masks with those that `mask` was given last."""

    def choose(self, logits: Tensor, prepared: Any, step: Step) -> Tensor:
        """Return token ids [S], int64, from logits [S, vocab], which may be overwritten. Negative ids: error codes."""

    def check(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Batch:
    transforms: tuple[tuple[Transform, Part], ...]
    choosers: tuple[tuple[Chooser, Part], ...]
    greedy: Part | None


class TorchChoice:
    """Chooses by torch, on any device. Computes only the filters that rows of the batch use."""

    takes_any_dtype = False

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._transforms: tuple[Transform, ...] = (Temperature(num_rows, device), MinP(num_rows, device))
        self._choosers: tuple[Chooser, ...] = (
            DrawFromAll(num_rows, vocab_size),
            DrawFromTopK(num_rows, vocab_size, device),
            DrawFromTopP(num_rows, vocab_size, device),
        )
        self._features: tuple[Transform | Chooser, ...] = (*self._transforms, *self._choosers)
        self._streams = Streams(num_rows, device)

    def add(self, new: NewRow) -> None:
        if new.sampling.is_greedy:
            return  # no feature is for rows that draw nothing
        for feature in self._features:
            feature.add(new)
        self._streams.put(new.row, new.seed, new.sample_index)

    def remove(self, row: int) -> None:
        for feature in self._features:
            feature.members.leave(row)

    def prepare(self, rows: Ints) -> _Batch:
        transforms = [(transform, transform.members.part(rows, self._device)) for transform in self._transforms]
        choosers = [(chooser, chooser.members.part(rows, self._device)) for chooser in self._choosers]
        return _Batch(
            tuple((transform, part) for transform, part in transforms if part is not None),
            tuple((chooser, part) for chooser, part in choosers if part is not None),
            self._greedy_part(rows),
        )

    def mask(self, logits: Tensor, masks: Masks, prepared: _Batch, samples: Samples) -> None:  # noqa: ARG002
        apply_masks(logits, masks)

    def forget_masks(self, rows: Ints) -> None:
        """Do nothing: no masks are kept."""

    def choose(self, logits: Tensor, prepared: _Batch, step: Step) -> Tensor:  # [S]
        for transform, part in prepared.transforms:
            transform.apply(logits, part, step)
        tops = tile_max(logits)  # [S, tiles]
        chosen = [(part, self._draw(chooser, part, logits, tops, step)) for chooser, part in prepared.choosers]
        if prepared.greedy is not None:
            chosen.append((prepared.greedy, best_token(prepared.greedy.take(logits), prepared.greedy.take(tops))))
        return mark_failures(_joined(chosen), tops.amax(dim=-1))

    def check(self) -> None:
        for feature in self._features:
            feature.members.check()

    def _greedy_part(self, rows: Ints) -> Part | None:
        no_slots: npt.NDArray[np.int64] = np.zeros(len(rows), dtype=np.int64)
        drawn = np.logical_or.reduce([chooser.members.among(rows) for chooser in self._choosers])
        return make_part(rows, ~drawn, no_slots, self._device)

    def _draw(self, chooser: Chooser, part: Part, logits: Tensor, tops: Tensor, step: Step) -> Tensor:  # [G]
        uniform = self._streams.uniform(part.rows, step.num_outputs(part))
        logits, tops = part.take(logits), part.take(tops)
        drawn = [
            chooser.choose(logits[lines], tops[lines], part.slots[lines], uniform[lines])
            for lines in (slice(start, start + _LINES_AT_ONCE) for start in range(0, len(logits), _LINES_AT_ONCE))
        ]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _joined(chosen: list[tuple[Part, Tensor]]) -> Tensor:
    """Join the token ids of a batch's parts in the order of the batch."""
    first_part, first_ids = chosen[0]
    if first_part.whole:
        return first_ids
    token_ids = first_ids.new_empty(sum(len(ids) for _, ids in chosen))
    for part, ids in chosen:
        token_ids.index_copy_(0, part.positions, ids)
    return token_ids


def mark_failures(token_ids: Tensor, best: Tensor) -> Tensor:  # [S], [S] -> [S]
    """Replace token ids by error codes where the row's largest transformed logit `best` is not finite."""
    mark = torch.where(best == float("-inf"), NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(best.isfinite(), token_ids, mark)


def row_failures(rows: Ints, token_ids: Ints, masked: Ints = NO_ROWS) -> tuple[RowFailure, ...]:
    """Return the failures of rows whose token ids, copied to the host, are error codes of `Sampler.sample`.

    `masked` are the indices of samples that had a grammar's mask.
    """
    if not len(token_ids) or token_ids.min() >= 0:
        return ()
    under_masks = set(masked.tolist())
    failures: dict[int, str] = {}
    for place in (token_ids < 0).nonzero()[0].tolist():
        mark = int(token_ids[place])
        reason = _UNDER_A_MASK if mark == NOTHING_ALLOWED and place in under_masks else _REASONS[mark]
        failures.setdefault(int(rows[place]), reason)
    return tuple(RowFailure(row, reason) for row, reason in failures.items())
