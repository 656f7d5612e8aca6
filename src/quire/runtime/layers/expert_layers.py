"""Builds the mixtures of experts of a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire.config.model import Experts, ModelConfig
from quire.runtime.accelerator import dependent_rows
from quire.runtime.layers.experts import (
    ExpertScales,
    ExpertSet,
    MoEMLP,
    NormedRouter,
    NoScoreBias,
    Router,
    ScoreBias,
    SeparateExperts,
    SideExperts,
    clamp_of,
)
from quire.runtime.layers.gemm import Gemm
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.split import RankSplits
from quire.runtime.layers.stacked_experts import ExpertLinear, StackedExperts
from quire.runtime.parallel.expert_sum import expert_sum

if TYPE_CHECKING:
    from quire.runtime.layers.builder import LayerBuilder

Names = tuple[str, str, str]  # of gate, up and down
GATED = ("gate_proj", "up_proj", "down_proj")
SIDE_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


class ExpertLayers:
    """Builds mixtures of experts for a LayerBuilder. `table_gemm`: the gemm of layers that are never quantized."""

    def __init__(
        self, build: LayerBuilder, splits: RankSplits, table_gemm: Gemm, ops: LayerOps, *, float8: bool
    ) -> None:
        self._build, self._splits, self._table_gemm = build, splits, table_gemm
        self._ops, self._float8 = ops, float8

    def moe_mlp(self, config: ModelConfig, names: Names = GATED, router: str = "gate", shared: Names = GATED) -> MoEMLP:
        """Build a mixture of experts. `names` and `shared`: gate, up and down of an expert and of the shared one."""
        settings, hidden, activation = config.experts, config.hidden_size, config.activation
        assert settings is not None
        gate = Router(hidden, {router: settings.num}, settings.has_bias, self._table_gemm, self._build.placement)
        latent, experts = settings.latent_size, self._experts(settings.width(hidden), settings, activation, names)
        shared_mlp, shared_gate, around = None, None, None
        if settings.shared_size:
            make = partial(self._build.gated_mlp, names=shared) if settings.is_gated else self._build.plain_mlp
            shared_mlp = make(hidden, settings.shared_size, activation, bias=False, reduces=bool(latent))
        if latent:
            sizes = {"fc1_latent_proj": (hidden, latent), "fc2_latent_proj": (latent, hidden)}
            around = [self._build.linear(name, *size, bias=False) for name, size in sizes.items()]
        if settings.shared_has_gate:
            shared_gate = Router(hidden, {"shared_expert_gate": 1}, False, self._table_gemm, self._build.placement)
        is_row = settings.biased_softmax
        bias = ScoreBias(settings.num, self._build.placement, is_row=is_row) if settings.has_score_bias else None
        bias = bias if settings.mixer_jitter is None else NoScoreBias(settings.num, self._build.placement)
        return MoEMLP(gate, experts, settings, shared_mlp, shared_gate, bias, around)

    def side_experts(self, config: ModelConfig) -> SideExperts:
        """Build Gemma 4's parallel experts. Checkpoints store the weights of the router's norm times sqrt(hidden)."""
        assert config.experts is not None
        hidden, num, eps = config.hidden_size, config.experts.num, config.norm_eps
        norm = RMSNorm("scale", hidden, eps, self._ops, self._build.placement, factor=hidden**-0.5)
        proj = Router(hidden, {"proj": num}, False, self._table_gemm, self._build.placement)
        router = NormedRouter(norm, proj, ExpertScales(num, self._build.placement))
        experts = self._experts(hidden, config.experts, config.activation, GATED)
        first, second, third = (self._build.rms_norm(name, hidden, eps) for name in SIDE_NORMS)
        return SideExperts(router, experts, config.experts, (first, second, third))

    def _experts(self, hidden: int, settings: Experts, activation: str, names: Names) -> ExpertSet:
        """Build the experts. On the meta device they are stacked even without Triton, because thousands of layers take
        seconds to build."""
        device, splits, triton = self._build.placement.device, self._splits, self._build.backend.kernels == "triton"
        own, total = splits.experts(settings.num), expert_sum(splits.group, settings, whole=splits.whole_experts)
        size, bias, clamp = splits.expert_size(settings.size), settings.has_bias, clamp_of(settings)
        if not triton and device.type != "meta":
            mlp = (
                partial(self._build.gated_mlp, names=names, clamp=clamp) if settings.is_gated else self._build.plain_mlp
            )
            made = {number: mlp(hidden, size, activation, bias=bias, reduces=False) for number in own}
            return SeparateExperts(made, total)
        gate, up, down = names
        make = partial(ExpertLinear, own, placement=self._build.placement, bias=bias, float8=self._float8)
        group = None if size.is_whole else splits.group
        first = make(hidden, {gate: size, up: size} if settings.is_gated else {up: size})
        down_proj = make(size, {down: hidden}, group=group)
        rows = dependent_rows(device) if triton else 0
        return StackedExperts(first, down_proj, activation, self._ops, dependent_rows=rows, total=total)
