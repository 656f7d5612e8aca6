"""Several residual streams (AltUp): each layer predicts all of them, changes the first, and corrects the others by that
change. They lie side by side in the rows of one Stream [tokens, streams * hidden]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.kernels.native.program import Symbol
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.stream import Stream, Value, add_in_place
from quire.runtime.layers.weights import Placement, WeightLayer

_LEAST_SQUARE = 1e-5  # of vectors that are scaled to the size of another


class AltUp(WeightLayer):
    """The prediction and the correction of one layer. A router of the first stream weighs the streams."""

    is_always_dequantized = True

    def __init__(self, streams: int, hidden: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self._streams, self._hidden, self._eps = streams, hidden, eps
        sizes = {
            "altup.correct_output_scale": (hidden,), "altup.correction_coefs.weight": (streams, streams),
            "altup.prediction_coefs.weight": (streams * streams, streams),
            "altup.modality_router.weight": (streams, hidden), "altup.router_norm.weight": (hidden,),
        }  # fmt: skip
        self.parts = tuple(sizes)
        self._placement = placement
        self.weights = nn.ParameterList([placement.empty(*size, dtype=torch.float32) for size in sizes.values()])
        self._router = torch.empty(0)  # [hidden, streams], norm included

    def _part(self, part: str) -> Tensor:
        held: Tensor = self.weights[self.parts.index(part)].data
        return held

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        super().randomize(part, generator, dtype)
        if part.endswith(("scale", "norm.weight")):
            self._part(part).add_(1.0)

    def finish(self) -> None:
        scale, correction, prediction, router, norm = (weight.data for weight in self.weights)
        self._scale, self._correction, self._prediction = scale.to(self._placement.dtype), correction, prediction
        self._router = (router * norm / self._hidden).t().contiguous()
        del self.weights

    def predict(self, x: Stream) -> Value:
        """Replace the streams by their predictions. Returns a copy of the first one [tokens, hidden]."""
        wide = x.settle()
        if isinstance(wide, Symbol):
            return wide.writer.call(self._call_predict, (wide,), self._hidden)
        return self._predict(wide)

    def correct(self, x: Stream, changed: Value) -> Value:
        """Correct the streams, given what the layer made of the first one [tokens, hidden]. Returns the corrected first
        stream times its learned scale."""
        wide = x.settle()
        if isinstance(wide, Symbol):
            return wide.writer.call(self._call_correct, (wide, changed), self._hidden)
        return self._correct(wide, changed)

    def add_to_others(self, x: Stream, change: Value) -> None:
        """Add a change [tokens, hidden] to all streams but the first."""
        wide = x.settle()
        if isinstance(wide, Symbol):
            wide.writer.call(self._call_add, (wide, change), 1)
        else:
            self._add(wide, change)

    def _route(self, x: Tensor) -> Tensor:  # [tokens, hidden] -> [tokens, 1, streams], float32
        rows = x.float()
        scale = torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + self._eps)
        routed = torch.bmm(rows[:, None], self._router.expand(len(rows), -1, -1))  # by row: the same in every batch
        return torch.tanh(routed * scale[:, None])

    def _predict(self, wide: Tensor) -> Tensor:
        streams = wide.view(len(wide), self._streams, self._hidden)
        weights = torch.bmm(self._route(streams[:, 0]), self._prediction.t().expand(len(wide), -1, -1))
        weights = weights.view(-1, self._streams, self._streams).to(wide.dtype)
        streams.copy_(torch.baddbmm(streams, weights, streams))
        return streams[:, 0].clone()

    def _correct(self, wide: Tensor, changed: Tensor) -> Tensor:
        streams = wide.view(len(wide), self._streams, self._hidden)
        weights = torch.bmm(self._route(changed), self._correction.t().expand(len(wide), -1, -1)) + 1.0
        streams.addcmul_(weights.transpose(1, 2).to(wide.dtype), (changed - streams[:, 0])[:, None])
        return torch.mul(streams[:, 0], self._scale)

    def _add(self, wide: Tensor, change: Tensor) -> None:
        wide.view(len(wide), self._streams, self._hidden)[:, 1:] += change[:, None]

    # The same inside a program, as Python calls, which must return a tensor.
    def _call_predict(self, wide: Tensor, given: object) -> Tensor:  # noqa: ARG002
        return self._predict(wide)

    def _call_correct(self, wide: Tensor, changed: Tensor, given: object) -> Tensor:  # noqa: ARG002
        return self._correct(wide, changed)

    def _call_add(self, wide: Tensor, change: Tensor, given: object) -> Tensor:  # noqa: ARG002
        self._add(wide, change)
        return wide[:, :1]


def spread(hidden: Tensor, others: Tensor) -> Tensor:
    """Return all streams [tokens, streams * hidden]: the first one [tokens, hidden] and the others side by side, each
    scaled to the size of the first."""
    rows = others.view(len(hidden), -1, hidden.shape[1])
    return torch.cat((hidden, _scaled(rows, hidden[:, None]).flatten(1)), dim=1)


class MergedNorm(nn.Module):
    """The final norm of the mean of all streams, of which all but the first are projected and scaled to its size."""

    def __init__(self, projections: Sequence[Linear], norm: RMSNorm) -> None:
        super().__init__()
        self.altup_unembed_projections, self.norm = nn.ModuleList(projections), norm

    def forward(self, wide: Tensor) -> Tensor:  # [tokens, streams * hidden] -> [tokens, hidden]
        first, *others = wide.chunk(len(self.altup_unembed_projections) + 1, dim=1)
        pairs = zip(self.altup_unembed_projections, others, strict=True)
        rows = [first, *(_scaled(project(other.contiguous()), first) for project, other in pairs)]
        return self.norm(torch.stack(rows).mean(dim=0))  # type: ignore[no-any-return]


def _scaled(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows, each scaled to the root mean square of the row of `like`."""
    wanted = like.float().square().mean(dim=-1, keepdim=True)
    found = rows.float().square().mean(dim=-1, keepdim=True).clamp_(min=_LEAST_SQUARE)
    return rows * (wanted / found).sqrt_().to(rows.dtype)


class LowRankAddition(nn.Module):
    """A residual addition of low rank (LAuReL): x + norm(right(left(x)))."""

    def __init__(self, left: Linear, right: Linear, norm: RMSNorm) -> None:
        super().__init__()
        self.linear_left, self.linear_right, self.post_laurel_norm = left, right, norm

    def forward(self, x: Value) -> Value:  # [tokens, hidden]
        added = self.post_laurel_norm.of(self.linear_right(self.linear_left(x)))
        return add_in_place(added, x)
