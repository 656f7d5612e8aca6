"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 layer, attention without rotary positions, an MLP that squares the
positive activations, or a mixture of experts that are such MLPs, perhaps between projections to latents and back.

transformers bounds the step sizes of prompts, and not those of single tokens, by `time_step_min`; here nothing does.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.config.recurrent import Mamba, Recurrent
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models import gguf_mamba
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, Stacked
from quire.runtime.models.hf_config import (
    FULL,
    LINEAR,
    PLAIN,
    check_recurrent,
    read_activation,
    read_decoder,
    read_heads,
    refuse_other,
    refuse_set,
)
from quire.runtime.models.hf_experts import read_sigmoid_experts
from quire.runtime.models.hf_mamba import refuse_step_limit

_MLP, _MOE, _KINDS, _PATTERN = "mlp", "moe", "layers_block_type", "hybrid_override_pattern"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}  # of the pattern
_OLD = {"mamba": LINEAR, "attention": FULL}  # old names of kinds
_SIZES = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
_STACKED = {"up_proj": Stacked(("up_proj.weight",)), "down_proj": Stacked(("down_proj.weight",))}
_RENAMED = {"backbone.": "model.", "model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}


class NemotronHBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, recurrent, experts = config.hidden_size, config.norm_eps, config.recurrent, config.experts
        self.norm = build.rms_norm("norm", hidden, eps)
        if recurrent is not None and config.is_recurrent(layer):
            self.mixer: nn.Module = build.recurrent.mamba(hidden, recurrent, config.place_of(layer), eps)
        elif config.attends(layer):
            self.mixer = DecoderAttention(config, layer, build)
        elif experts is not None and layer not in experts.dense_layers:
            self.mixer = build.experts.moe_mlp(config)
        else:
            self.mixer = build.plain_mlp(hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)
        self._is_mlp = layer in config.mlp_layers

    def forward(self, x: Stream, step: ForwardStep) -> None:
        normed = self.norm(x)
        x.add(self.mixer(normed) if self._is_mlp else self.mixer(normed, step))


class NemotronH(Decoder):
    block = NemotronHBlock


def read_nemotron_h(config: Fields) -> ModelConfig:
    kinds = _read_kinds(config)
    for flag in ("attention_bias", "residual_in_fp32"):
        refuse_set(config, flag, usual=False)
    if config.raw("sliding_window") is not None:
        raise config.refuse("sliding_window", "is not supported")
    refuse_other(config, "mamba_hidden_act", "silu")
    refuse_step_limit(config)
    layers = {kind: tuple(layer for layer, own in enumerate(kinds) if own == kind) for kind in _LETTERS.values()}
    whole, eps = config.changed({"num_hidden_layers": len(kinds)}), config.number("layer_norm_epsilon", 1e-5)
    return read_decoder(
        whole, "nemotron_h", 4_096, heads=read_heads(config, 8, 128), norm_eps=eps,
        intermediate_size=config.integer("intermediate_size", 21_504), mlp_bias=config.flag("mlp_bias", False),
        activation=read_activation(config, PLAIN, "mlp_hidden_act", "relu2"),
        experts=_read_experts(whole, layers[_MOE]), mlp_layers=tuple(sorted(layers[_MLP] + layers[_MOE])),
        recurrent=_read_mamba(config, layers[LINEAR]), layers_without_rope=tuple(range(len(kinds))),
    )  # fmt: skip


def _read_kinds(config: Fields) -> list[str]:
    """Return the kind of each layer, from a list or from a pattern of letters."""
    key = _KINDS if config.raw(_KINDS) is not None else _PATTERN
    given = config.raw(key)
    if isinstance(given, str):
        given = [_LETTERS.get(letter, letter) for letter in given]
    if not isinstance(given, list) or not given or any(not isinstance(kind, str) for kind in given):
        raise config.refuse(key, "must name the kind of each layer")
    kinds = [_OLD.get(str(kind), str(kind)) for kind in given]
    for kind in kinds:
        if kind not in _LETTERS.values():
            known = ", ".join(_LETTERS.values())
            raise config.refuse(key, f"{kind!r} layers are not supported", fix=f"supported: {known}")
    if FULL not in kinds:
        raise config.refuse(key, "a model without attention is not supported")
    return kinds


def _read_experts(config: Fields, layers: tuple[int, ...]) -> Experts | None:
    if not layers:
        return None
    refuse_set(config, "mlp_bias", usual=False)
    latent = config.optional_integer("moe_latent_size", least=1)
    if config.integer("n_shared_experts", 1) != 1:
        raise config.refuse("n_shared_experts", "must be 1")
    others = tuple(layer for layer in range(config.integer("num_hidden_layers")) if layer not in layers)
    experts = read_sigmoid_experts(config, Experts(8, 2, 7_688), others, shared=None)
    size = config.integer("moe_shared_expert_intermediate_size", 7_688, least=1)
    return replace(experts, shared_size=size, is_gated=False, latent_size=latent or 0)


def _read_mamba(config: Fields, layers: tuple[int, ...]) -> Recurrent | None:
    groups, heads, state, dim, width = map(config.integer, _SIZES, (8, 128, 128, 64, 4))
    mamba = Mamba(norm_groups=groups, has_bias=config.flag("use_bias", False))
    bias = config.flag("use_conv_bias", True)
    sizes = Recurrent(groups, heads, state, dim, width, layers, kind="mamba", mamba=mamba, has_bias=bias)
    return check_recurrent(config, sizes, _SIZES) if layers else None


def rename(name: str) -> str | None:
    if name.startswith("mtp."):  # a head that drafts tokens
        return None
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name.replace(".mixer.shared_experts.", ".mixer.shared_expert.")


NEMOTRON_H = Family(
    name="nemotron_h", build=NemotronH, read=read_nemotron_h, rename=rename, gguf=gguf_mamba.NEMOTRON_H,
    stacked=_STACKED,
)  # fmt: skip
