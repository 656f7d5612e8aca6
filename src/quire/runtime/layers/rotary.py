"""Rotary positions (half-split layout) with the scalings of published models, computed like transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.config.model import QUERY_SCALE, QueryScaling, Rope
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError


class PositionedTokens(Protocol):
    """What a rotation reads of a step of a decoder or of a batch of an encoder."""

    @property
    def positions(self) -> Tensor: ...  # [tokens]
    @property
    def lengths(self) -> Tensor: ...  # [tokens], of the sequence; read only by rotations that change with it
    @property
    def axes(self) -> Tensor | None: ...
    @property
    def max_length(self) -> int: ...
    @property
    def memo(self) -> dict[Any, Any]: ...


class Rotation(NamedTuple):
    """Cos and sin of a step's tokens; the first half of `sin` is negated."""

    cos: Tensor  # [tokens, 1, dim]
    sin: Tensor  # [tokens, 1, dim]


class Rotary(nn.Module):
    """Computes the rotation of a step. Angles are float32; the table grows to the longest sequence seen."""

    def __init__(self, rope: Rope, dim: int, placement: Placement) -> None:
        super().__init__()
        self._rope, self._dim, self._placement = rope, dim, placement
        self._frequencies, self._magnitude = frequencies(rope, dim)
        self._table = torch.empty(0, 2 * dim)  # [positions, cos then signed sin], run dtype
        self._angles = torch.empty(0, dim)  # [positions, dim]: cos [dim / 2], then sin [dim / 2]
        self._axis_of = _axes_of_pairs(rope.sections).to(placement.device)  # [dim / 2], empty with one axis

    @property
    def is_static(self) -> bool:
        """Whether angles depend only on a token's position."""
        return self._rope.kind not in CHANGING or not is_stretched(self._rope)

    def forward(self, step: PositionedTokens) -> Rotation:
        """Return the rotation of a step's tokens, computed once per step."""
        found = step.memo.get(self)
        if found is None:
            found = step.memo[self] = self._rotation(step)
        return found

    def _rotation(self, step: PositionedTokens) -> Rotation:
        change = CHANGING.get(self._rope.kind)
        if change is not None and step.max_length > first_length(self._rope):
            both = self._tabulate(step.positions, change(self._rope, self._dim, step.lengths))
        else:
            if step.max_length > len(self._table):
                self._grow(step.max_length)
            both = self._look_up(self._table, step)
        cos, sin = torch.split(both.unsqueeze(1), self._dim, dim=-1)
        return Rotation(cos, sin)

    def angles_of(self, step: PositionedTokens) -> tuple[Tensor, Tensor | None]:
        """Return `angles` and the table row of each token, or None if that is its position. With several axes the table
        is computed for the step's tokens. For Triton."""
        table = self.angles(step.max_length)
        if step.axes is None or not len(self._axis_of):
            return table, None
        found = step.memo.get((self, "angles"))
        if found is None:
            own = self._look_up(table, step)
            found = step.memo[self, "angles"] = own, torch.arange(len(own), device=own.device)
        return found

    def _look_up(self, table: Tensor, step: PositionedTokens) -> Tensor:  # [tokens, columns of the table]
        """Return a step's rows of `table`, whose columns are one or more repetitions of the dim / 2 pairs."""
        axes = step.axes
        if axes is None or not len(self._axis_of):
            return table.index_select(0, step.positions)
        if len(axes) == 1:
            return table.index_select(0, axes[0])
        lines = axes.index_select(0, self._axis_of).t()  # [tokens, dim / 2]
        return table.gather(0, lines.repeat(1, table.shape[1] // lines.shape[1]))

    def angles(self, length: int) -> Tensor:  # [length at least, dim]
        """Return cos, then sin, of dim / 2 frequencies for every position. Not for rotations that change with the
        sequence length.

        The table keeps its address while it is long enough, so that graphs can be captured with it.
        """
        if length > len(self._angles):
            if length > len(self._table):
                self._grow(length)
            cos, _, _, sin = self._table.chunk(4, dim=-1)
            self._angles = torch.cat((cos, sin), dim=-1)
        return self._angles

    def _grow(self, length: int) -> None:
        length = 1 << max(10, (length - 1).bit_length())
        positions = torch.arange(length, device=self._placement.device)
        self._table = self._tabulate(positions, self._frequencies.to(self._placement.device))

    def _tabulate(self, positions: Tensor, inverse: Tensor) -> Tensor:  # inverse: [dim / 2] or [positions, dim / 2]
        angles = positions[:, None].float() * inverse
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return torch.cat((cos, cos, -sin, sin), dim=-1).to(self._placement.dtype)


class QueryScale(Rotary):
    """Scales the queries of long sequences by their position (Ministral 3, Mistral 4, Llama 4), as a rotation by no
    angle. Its tables are as large as those of a rotation."""

    def __init__(self, scaling: QueryScaling, dim: int, placement: Placement) -> None:
        super().__init__(Rope(), dim, placement)
        self._scaling = scaling

    def _tabulate(self, positions: Tensor, inverse: Tensor) -> Tensor:
        own = self._scaling
        scale = 1 + own.beta * torch.log(1 + torch.floor((positions + own.offset) / own.length))
        whole = scale[:, None].expand(-1, 2 * inverse.shape[-1])
        return torch.cat((whole, torch.zeros_like(whole)), dim=-1).to(self._placement.dtype)


class Rotaries:
    """The rotations and query scales of a model. Layers with the same positions share them."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rotaries: dict[tuple[Rope, int], Rotary] = {}
        self._query_scales: dict[tuple[QueryScaling, int], QueryScale] = {}

    def rotary(self, rope: Rope, dim: int) -> Rotary:
        if (rope, dim) not in self._rotaries:
            self._rotaries[rope, dim] = Rotary(rope, dim, self._placement)
        return self._rotaries[rope, dim]

    def query_scale(self, source: Rope | QueryScaling | None, dim: int) -> QueryScale | None:
        """Return the scale of queries, or None if these positions do not scale them."""
        if isinstance(source, Rope):
            beta = dict(source.scaling).get(QUERY_SCALE)
            source = QueryScaling(beta, first_length(source)) if beta else None
        if source is None:
            return None
        if (source, dim) not in self._query_scales:
            self._query_scales[source, dim] = QueryScale(source, dim, self._placement)
        return self._query_scales[source, dim]


def _axes_of_pairs(sections: tuple[int, ...]) -> Tensor:  # [dim / 2]
    """Return the index of the axis by which each pair of a head rotates."""
    axes = torch.arange(len(sections)) % 3
    return axes.repeat_interleave(torch.tensor(sections, dtype=torch.int64))


def frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """Return inverse frequencies [dim / 2], float32, and the factor on cos and sin."""
    if rope.dim == 0:
        return torch.zeros(dim // 2), 1.0
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.frequency_factors:
        plain = plain / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    scaling = dict(rope.scaling)
    if rope.kind in ("default", "dynamic"):  # dynamic scales only past max_position
        return plain, 1.0
    if rope.kind == "linear":
        return plain / _need(rope, scaling, "factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope, scaling), 1.0
    if rope.kind == "proportional":  # only the first pairs of a head rotate
        turning = int(scaling.get("partial_rotary_factor", 1.0) * dim // 2)
        plain[turning:] = 0.0
        return plain / scaling.get("factor", 1.0), 1.0
    if rope.kind == "longrope":
        return plain, _need(rope, scaling, "attention_factor")
    return _yarn(dim, rope, scaling)


def dynamic_frequencies(rope: Rope, dim: int, lengths: Tensor) -> Tensor:
    """Return NTK frequencies [tokens, dim / 2] for tokens whose sequence is `lengths` long when they are computed.

    A prompt is rotated by its whole length and each later token by the length at that token, as in transformers with a
    single sequence. A sequence recomputed after preemption is rotated by its length at that time.
    """
    factor = _need(rope, dict(rope.scaling), "factor")
    seen = lengths.clamp(min=rope.max_position)
    stretch = ((factor * seen / rope.max_position) - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=lengths.device) / dim
    scaled = 1.0 / ((rope.theta * stretch)[:, None] ** exponents)
    plain = frequencies(rope, dim)[0].to(lengths.device)
    return torch.where(lengths[:, None] > rope.max_position, scaled, plain)


def long_frequencies(rope: Rope, dim: int, lengths: Tensor) -> Tensor:
    """Return longrope's frequencies [tokens, dim / 2]: the long factors for tokens of sequences longer than
    `first_length`, the short factors for others. `lengths`: of the sequence when the token is computed."""
    short, long = (frequencies(each, dim)[0] for each in (rope, replace(rope, frequency_factors=rope.long_factors)))
    is_long = lengths[:, None] > first_length(rope)
    return torch.where(is_long, long.to(lengths.device), short.to(lengths.device))


# Kinds whose frequencies depend on the length of the sequence.
CHANGING = {"dynamic": dynamic_frequencies, "longrope": long_frequencies}


def first_length(rope: Rope) -> float:
    """Return the longest sequence whose frequencies are unscaled."""
    return dict(rope.scaling).get("original_max_position_embeddings", rope.max_position)


def is_stretched(rope: Rope) -> bool:
    """Whether sequences may be longer than `first_length`. With dynamic scaling they may have any length."""
    return rope.kind == "dynamic" or rope.max_position > first_length(rope)


def _llama3(plain: Tensor, rope: Rope, scaling: dict[str, float]) -> Tensor:
    factor = _need(rope, scaling, "factor")
    low, high = _need(rope, scaling, "low_freq_factor"), _need(rope, scaling, "high_freq_factor")
    context = _need(rope, scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    blend = (context / wavelength - low) / (high - low)
    medium = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(wavelength > context / low, plain / factor, medium)
    return torch.where(wavelength < context / high, plain, scaled)


def _yarn(dim: int, rope: Rope, scaling: dict[str, float]) -> tuple[Tensor, float]:
    context = _need(rope, scaling, "original_max_position_embeddings")
    factor = scaling.get("factor") or rope.max_position / context
    fast, slow = scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0

    def dimension_turning(times: float) -> float:
        return (dim * math.log(context / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_turning(fast), dimension_turning(slow)
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    turns = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (1.0 / (factor * turns)) * (1 - kept) + (1.0 / turns) * kept, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: dict[str, float]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return given

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scale and scale_all:
        return magnitude(scale) / magnitude(scale_all)
    return magnitude(1.0)


def _need(rope: Rope, scaling: dict[str, float], name: str) -> float:
    if name not in scaling:
        raise ConfigError("rope_scaling", f"{rope.kind} needs {name}", "add it to the model's config")
    return scaling[name]
