"""Falcon-H1: every layer has attention and a Mamba-2 layer side by side. Factors scale their inputs and outputs."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.recurrent import Mamba
from quire.kernels.clamp import Clamp
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.models import gguf_mamba
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_decoder, read_heads, refuse_set
from quire.runtime.models.hf_mamba import read_mamba
from quire.runtime.models.mamba_hybrid import MambaBlock, rename


class FalconBlock(MambaBlock):
    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:
        """A factor on the gate makes it gate * sigmoid(factor * gate), times the factor, which scales the output."""
        size, clamp = config.intermediate_size, None
        if config.mlp_factors is not None:
            gate, down = config.mlp_factors
            clamp, self._mlp_scale = Clamp(math.inf, gate, 0.0), gate * down
        return build.gated_mlp(config.hidden_size, size, "silu", bias=config.mlp_bias, clamp=clamp)


class FalconH1(Decoder):
    block = FalconBlock


def read_falcon_h1(config: Fields) -> ModelConfig:
    for flag in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        refuse_set(config, flag, usual=False)
    count, heads = config.integer("num_hidden_layers"), read_heads(config, 8)
    before, after, key = (_factor(config, f"{name}_multiplier") for name in ("attention_in", "attention_out", "key"))
    gate, down = _factors(config, "mlp_multipliers", 2)
    mixed = before * after  # the values are not scaled, the outputs of attention are
    into, out = _factor(config, "ssm_in_multiplier"), _factor(config, "ssm_out_multiplier")
    z, x, b, c, steps = (into * each for each in _factors(config, "ssm_multipliers", 5))
    factors, norms = (z, x, b, c, steps), config.flag("mamba_rms_norm", False)
    mamba = Mamba(
        config.integer("mamba_n_groups", 1, least=1) if norms else None,
        norm_first=norms and config.flag("mamba_norm_before_gate", True),
        input_factors=None if set(factors) == {1.0} else factors, output_factor=out / mixed,
    )  # fmt: skip
    inner = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if config.values.get("mamba_d_ssm", 1_024) is not None:  # null, unlike a missing value, leaves it to mamba_expand
        inner = config.integer("mamba_d_ssm", 1_024)
    recurrent = read_mamba(config, range(count), mamba, inner)
    assert recurrent is not None
    return read_decoder(
        config, "falcon_h1", 8_192, heads=heads, norm_eps=config.number("rms_norm_eps", 1e-5),
        embedding_scale=_factor(config, "embedding_multiplier"), logit_scale=_factor(config, "lm_head_multiplier"),
        attention_scale=None if key == before == 1.0 else heads.dim**-0.5 * before * before * key,
        residual_scale=mixed, mlp_factors=None if gate == down == 1.0 else (gate, down),
        recurrent=replace(recurrent, beside_attention=True),
    )  # fmt: skip


def _factor(config: Fields, key: str) -> float:
    factor = config.number(key, 1.0)
    if factor == 0:
        raise config.refuse(key, "must not be 0")
    return factor


def _factors(config: Fields, key: str, count: int) -> list[float]:
    given = config.raw(key)
    if given is None:
        return [1.0] * count
    if not isinstance(given, list) or len(given) != count or any(type(each) not in (int, float) for each in given):
        raise config.refuse(key, f"must be a list of {count} numbers")
    return [float(each) for each in given]


FALCON_H1 = Family(name="falcon_h1", build=FalconH1, read=read_falcon_h1, rename=rename, gguf=gguf_mamba.FALCON_H1)
