"""Mixture-of-experts layers: a router scores the experts for every token, and the top ones replace the MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from quire.config.model import Experts
from quire.kernels.clamp import Clamp
from quire.kernels.native.low_rank import LowRankSlots
from quire.kernels.native.program import Symbol
from quire.kernels.native.weights import ExpertWeights
from quire.kernels.reference.experts import choose_experts, sparse_mixer
from quire.runtime.layers.adapted import ActiveAdapters, NativeAdapters
from quire.runtime.layers.linear import Linear, all_reduce
from quire.runtime.layers.mlp import MLP, GatedMLP, native_weights
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.step import AdaptedRows, ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream, Value, add_in_place
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.parallel.expert_sum import NO_SUM, ExpertSum

_OfEach = tuple[Tensor | None, Tensor | None]  # per-expert factors and score bias, [experts] each


class Router(Linear):
    """Logits [tokens, experts]. Never quantized: routing to a wrong expert costs more accuracy than quantizing the
    small weight would save memory."""

    is_quantizable = False


class ScoreBias(WeightLayer):
    """Bias [experts], float32, added to each expert's score when experts are ranked. It does not change the weights of
    the chosen experts."""

    parts: tuple[str, ...] = ("gate.e_score_correction_bias",)

    def __init__(self, num: int, placement: Placement, *, is_row: bool = False) -> None:
        """`is_row`: checkpoints store it as [1, experts]."""
        super().__init__()
        self.weight = placement.empty(*((1, num) if is_row else (num,)), dtype=torch.float32)


class NoScoreBias(ScoreBias):
    """A bias of zeros, which no checkpoint stores: experts are ranked by their sigmoids alone."""

    parts = ()

    def __init__(self, num: int, placement: Placement) -> None:
        super().__init__(num, placement)
        self.weight.data.zero_()


class ExpertScales(WeightLayer):
    """A learned factor [experts], float32, that multiplies the routing weight of each expert."""

    parts = ("per_expert_scale",)
    random_mean = 1.0

    def __init__(self, num: int, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(num, dtype=torch.float32)


class NormedRouter(nn.Module):
    """Router with an RMSNorm of the residual stream in front and a factor for each expert's weight (Gemma 4). Returns
    logits [tokens, experts]."""

    def __init__(self, norm: RMSNorm, proj: Router, scales: ExpertScales) -> None:
        super().__init__()
        norm.parts = ("scale",)
        self.norm, self.proj, self.scales = norm, proj, scales

    @property
    def factors(self) -> Tensor:  # [experts]
        return self.scales.weight.data

    def forward(self, x: Stream) -> Value:
        return self.proj(self.norm(x))


class ExpertSet(Protocol):
    """A module that holds a layer's experts. With several ranks it holds either some whole experts or a shard of every
    expert."""

    def mix(
        self, x: Value, logits: Value, experts: Experts, shared: tuple[Value, ...] = (),
        rows: Tensor | None = None, factors: Tensor | None = None, score_bias: Tensor | None = None,
    ) -> Value:  # fmt: skip
        """Route x [tokens, hidden] by `logits` [tokens, experts] and return the weighted sum of the experts [tokens,
        hidden].

        shared: the output of the shared expert [tokens, hidden] and the logits of its gate [tokens, 1]; only the first;
        or nothing. With several ranks this is the rank's partial sum, and the result is summed over ranks.
        rows [tokens]: negative for a padding token, which is routed to no expert; its output is undefined.
        factors [experts], float32: multiply the weight of each expert.
        score_bias [experts], float32: for models that rank experts by sigmoid scores.
        """


class SeparateExperts(nn.ModuleDict):
    """Experts with a weight tensor each. The rows of one expert are multiplied together, one expert after the other.
    The outputs for a token are summed in ascending order of its experts, so the sum does not depend on the batch."""

    def __init__(self, experts: Mapping[int, GatedMLP | MLP], total: ExpertSum = NO_SUM) -> None:
        """`experts`: the experts of this rank by their index; indices are consecutive. `total`: sums over ranks."""
        super().__init__({str(number): expert for number, expert in experts.items()})
        self.own, self._total = range(min(experts), max(experts) + 1), total

    @property
    def gemms(self) -> dict[str, tuple[Linear, ...]]:
        """The linear layers of every expert, by the name of the gemm."""
        mlps = self._mlps
        return {mlps[0].first_name: tuple(e.first for e in mlps), "down_proj": tuple(e.down_proj for e in mlps)}

    @property
    def _mlps(self) -> list[GatedMLP | MLP]:
        return cast("list[GatedMLP | MLP]", list(self.values()))

    @property
    def _active(self) -> ActiveAdapters | None:
        """The LoRA adapters of the running step, or None if no adapter changes experts."""
        adapters = self._mlps[0].first.adapters
        return None if adapters is None else adapters.active

    def mix(
        self,
        x: Value,
        logits: Value,
        experts: Experts,
        shared: tuple[Value, ...] = (),
        rows: Tensor | None = None,  # noqa: ARG002
        factors: Tensor | None = None,
        score_bias: Tensor | None = None,
    ) -> Value:
        if isinstance(x, Symbol):
            return self._trace_program(x, logits, experts, shared, (factors, score_bias))
        active = self._active
        adapted = active.rows if active is not None and active.is_on else None
        return self.mix_rows(x, logits, experts, shared, (factors, score_bias), adapted)

    def mix_rows(
        self,
        x: Tensor,
        logits: Tensor,
        experts: Experts,
        shared: tuple[Tensor, ...],
        each: _OfEach,
        adapted: AdaptedRows | None,
    ) -> Tensor:
        """Compute `mix` for tensors. `adapted`: the LoRA adapters of x's rows."""
        (factors, score_bias), active = each, self._active
        used, groups = experts.num_used, (experts.num_groups, experts.groups_used)
        chosen, weights = choose_experts(
            logits, used, is_normalized=experts.is_normalized, scale=experts.scale, factors=factors, groups=groups,
            score_bias=score_bias,
        )  # fmt: skip
        out = _shared_part(shared) if shared else torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        senders = self._total.senders(chosen)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts.num).tolist()
        shares = weights.flatten()[order].unsqueeze(1)
        begin = sum(counts[: self.own.start])
        for expert, count in zip(self.values(), counts[self.own.start : self.own.stop], strict=True):
            if count == 0:
                continue
            mine = slice(begin, begin + count)
            begin += count
            tokens = order[mine] // used
            rows = None if adapted is None else adapted.at(tokens.cpu().numpy())
            with nullcontext() if active is None else active.only(rows):
                made = expert(x.index_select(0, tokens)).value()
            out.index_add_(0, tokens, made.float().mul_(shares[mine]))
        return self._total.of(out.to(x.dtype), senders)

    def _trace_program(
        self, x: Symbol, logits: Symbol, experts: Experts, shared: tuple[Symbol, ...], each: _OfEach
    ) -> Symbol:
        """Append the operation to the program that is being traced."""
        linears = [pair for mlp in self._mlps if (pair := native_weights(mlp)) is not None]
        if len(linears) < len(self):
            is_narrowed = self._active is not None and self._active.is_narrowed
            mix = partial(_mix, self, experts, each, is_narrowed)
            return x.writer.call(mix, (x, logits, *shared), x.width)
        gate_up, down = zip(*linears, strict=True)
        (factors, score_bias), mlp = each, self._mlps[0]
        weights = ExpertWeights(
            gate_up, down, experts.num_used, experts.is_normalized, experts.scale, clamp_of(experts),
            mlp.activation, factors, (experts.num_groups, experts.groups_used), score_bias, self.own.start,
            tuple(map(_slots_of, self.gemms.values())), mlp.is_gated,
        )  # fmt: skip
        mixed, group = x.writer.mix(x, logits, weights, shared), self._total.group
        return mixed if group is None else cast("Symbol", all_reduce(group, mixed))


class SideExperts(nn.Module):
    """Experts in parallel to a dense MLP (Gemma 4). They read the residual stream through their own norm; the outputs
    of MLP and experts are normed separately and added. `norms`: of the stream, of the MLP's output, of the experts'
    output."""

    def __init__(
        self, router: NormedRouter, experts: ExpertSet, settings: Experts, norms: tuple[RMSNorm, RMSNorm, RMSNorm]
    ) -> None:
        super().__init__()
        self.router, self.experts, self._settings = router, experts, settings
        self.pre_feedforward_layernorm_2, self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norms

    def forward(self, x: Stream, fed: Projected) -> Value:  # [tokens, hidden]
        first = self.post_feedforward_layernorm_1.of(fed.value())
        logits, value = self.router(x), self.pre_feedforward_layernorm_2(x).value()
        mixed = self.experts.mix(value, logits, self._settings, (), x.rows, self.router.factors)
        return add_in_place(first, self.post_feedforward_layernorm_2.of(mixed))


class MoEMLP(nn.Module):
    """The weighted sum of the experts chosen for a token, plus the shared expert if the model has one. `latent`: the
    projections of the experts' inputs to latents and of their sum back (Nemotron 3 Super)."""

    def __init__(
        self,
        gate: Router,
        experts: ExpertSet,
        settings: Experts,
        shared_expert: GatedMLP | MLP | None = None,
        shared_expert_gate: Linear | None = None,
        score_bias: ScoreBias | None = None,
        latent: Sequence[Linear] | None = None,
    ) -> None:
        super().__init__()
        self.score_bias, self.has_latents = score_bias, latent is not None
        if latent is not None:
            assert shared_expert_gate is None
            self.fc1_latent_proj, self.fc2_latent_proj = latent
        self.gate, self.experts, self._settings = gate, experts, settings
        self.shared_expert, self.shared_expert_gate = shared_expert, shared_expert_gate

    def forward(self, x: Normed | Stream) -> Value:  # [tokens, hidden]
        stream = x if isinstance(x, Stream) else x.stream
        if stream.is_empty:
            return stream.x
        rows, value = stream.rows, stream.settle() if isinstance(x, Stream) else x.value()
        shared: tuple[Value, ...] = ()
        if self.shared_expert is not None:
            projected: Projected = self.shared_expert(value)
            shared = (projected.value(),)
        if self.shared_expert_gate is not None:
            shared += (self.shared_expert_gate(value),)
        logits = self.gate(value)
        bias = None if self.score_bias is None else self.score_bias.weight.data.view(-1)
        if self._settings.biased_softmax and bias is not None:
            logits, bias = _hide_others(logits, bias, self._settings.num_used), None
        if self._settings.mixer_jitter is not None:
            logits = _mix_sparsely(logits, self._settings.mixer_jitter)
        if self._settings.scales_inputs:
            value = _scale_by_score(value, logits)
        if self.has_latents:
            mixed = self.experts.mix(self.fc1_latent_proj(value), logits, self._settings, (), rows, score_bias=bias)
            made: Value = self.fc2_latent_proj(mixed)
            return add_in_place(made, *shared) if shared else made
        return self.experts.mix(value, logits, self._settings, shared, rows, score_bias=bias)


def _hide_others(logits: Value, bias: Tensor, num_used: int) -> Value:
    """Set the logits of all but the chosen experts to -inf: those that rank highest by softmax plus bias."""
    if isinstance(logits, Symbol):
        return logits.writer.hide_others(logits, bias, num_used)
    ranked = torch.softmax(logits, dim=-1, dtype=torch.float32) + bias
    chosen = ranked.topk(num_used, dim=-1).indices
    return torch.full_like(logits, float("-inf")).scatter_(-1, chosen, logits.gather(-1, chosen))


def _mix_sparsely(logits: Value, jitter: float) -> Value:
    """Return logits whose sigmoids are the weights of a token's two experts."""
    if isinstance(logits, Symbol):
        return logits.writer.call(lambda each, _: sparse_mixer(each, jitter), (logits,), logits.width)
    return sparse_mixer(logits, jitter).to(logits.dtype)


def _scale_by_score(x: Value, logits: Value) -> Value:
    """Multiply each row by the sigmoid of its highest logit."""
    if isinstance(x, Symbol):
        return x.writer.scale_by_score(x, logits)
    return x * torch.sigmoid(logits.amax(dim=-1, keepdim=True).float()).to(x.dtype)


def clamp_of(experts: Experts) -> Clamp | None:
    return None if experts.clamp is None else Clamp(*experts.clamp)


def _shared_part(shared: tuple[Tensor, ...]) -> Tensor:  # [tokens, hidden], float32, new
    output, *gate = shared
    factor = torch.sigmoid(gate[0].float()) if gate else torch.ones((), device=output.device)
    return output.float() * factor


def _slots_of(linears: Sequence[Linear]) -> list[LowRankSlots]:
    """Return the LoRA slots of each expert for the compiled kernels, or [] without adapters."""
    return [linear.adapters.slots for linear in linears if isinstance(linear.adapters, NativeAdapters)]


def _mix(
    experts: SeparateExperts, settings: Experts, each: _OfEach, is_narrowed: bool, x: Tensor, logits: Tensor,
    *others: Any,
) -> Tensor:  # fmt: skip
    """Run the experts as a Python call of a program; the last argument is the run's ForwardStep. `is_narrowed`: the
    rows are only the wanted tokens."""
    *shared, step = others
    adapted = None
    if isinstance(step, ForwardStep) and step.adapters is not None:
        adapted = step.adapters.wanted if is_narrowed and step.wanted is not None else step.adapters.tokens
    return experts.mix_rows(x, logits, settings, tuple(shared), each, adapted)
