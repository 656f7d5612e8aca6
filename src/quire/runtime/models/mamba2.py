"""Mamba 2, as in Codestral Mamba: Mamba-2 layers and nothing else.

The norm behind a scan is by group, as in mamba_ssm, vLLM and llama.cpp. transformers norms all groups together, which
is the same for one group. `norm_before_gate`, which some files set, is not read: the gate comes first in all of them.
As for Mamba, the residual stream has the dtype of the run, and texts may have any length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.config.recurrent import Mamba, Recurrent
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models import gguf_mamba
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.gguf_selective import LENGTH, NO_HEADS, whole
from quire.runtime.models.hf_config import check_recurrent, read_decoder, refuse_other, refuse_set
from quire.runtime.models.hf_mamba import refuse_step_limit
from quire.runtime.models.mamba import rename

_SIZES = {"n_groups": 8, "num_heads": 128, "state_size": 128, "head_dim": 64, "conv_kernel": 4}  # and their defaults


class Mamba2Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        assert config.recurrent is not None
        hidden, eps = config.hidden_size, config.norm_eps
        self.norm = build.rms_norm("norm", hidden, eps)
        self.mixer = build.recurrent.mamba(hidden, config.recurrent, config.place_of(layer), eps)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.mixer(self.norm(x), step))


class Mamba2(Decoder):
    block = Mamba2Block


def read_mamba2(config: Fields) -> ModelConfig:
    refuse_other(config, "hidden_act", "silu")
    refuse_step_limit(config)
    refuse_set(config, "rms_norm", usual=True)
    count, hidden = config.integer("num_hidden_layers", 64), config.integer("hidden_size", 4_096)
    groups, heads, state, dim, width = (config.integer(key, usual) for key, usual in _SIZES.items())
    inner = int(config.number("expand", 2) * hidden)
    if heads * dim != inner:
        raise config.refuse("num_heads", f"{heads} heads must have {inner} elements, have {dim} each")
    mamba = Mamba(groups, has_bias=config.flag("use_bias", False))
    bias = config.flag("use_conv_bias", True)
    sizes = Recurrent(groups, heads, state, dim, width, tuple(range(count)), kind="mamba", mamba=mamba, has_bias=bias)
    length = config.integer("max_position_embeddings", LENGTH)
    return read_decoder(
        config, "mamba2", length, heads=NO_HEADS, rope=Rope(max_position=length), intermediate_size=inner,
        norm_eps=config.number("layer_norm_epsilon", 1e-5), layers_without_rope=tuple(range(count)),
        recurrent=check_recurrent(config, sizes, tuple(_SIZES)),
    )  # fmt: skip


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    layers = tuple(range(config.num_layers))
    rope = replace(config.rope, max_position=min(config.rope.max_position, LENGTH))
    recurrent = gguf_mamba.read_recurrent(fields, layers, Mamba(fields.integer("ssm.group_count", least=1)))
    return replace(config, rope=rope, recurrent=recurrent, layers_without_rope=layers)


GGUF = GgufFamily(
    inner=gguf_mamba.names_of("mixer") | {"attn_norm": "norm"}, settings=frozenset(gguf_mamba.KEYS), read=read_gguf,
    whole=whole, rearrange=partial(gguf_mamba.rearrange, path="mixer"),
)  # fmt: skip
MAMBA2 = Family(name="mamba2", build=Mamba2, read=read_mamba2, rename=rename, gguf=GGUF)
