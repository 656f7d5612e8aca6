"""Mamba (the first) and FalconMamba: recurrent layers and nothing else. FalconMamba norms step sizes, B and C.

transformers may keep the residual stream in float32; here it has the dtype of the run. A state has a fixed size, so
that texts may have any length: config.json rarely says one, and 32,768 tokens are the default.
"""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.config.recurrent import Recurrent, Selective
from quire.kernels.selective import MOST_STATE_SIZE
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.gguf_selective import GGUF, LENGTH, NO_HEADS
from quire.runtime.models.hf_config import check_width, read_decoder, refuse_other

_RENAMED = {
    "backbone.": "model.", "model.embeddings.": "model.embed_tokens.", "model.embedding.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}  # fmt: skip


class MambaBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        assert config.recurrent is not None
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps)
        self.mixer = build.recurrent.selective(config.hidden_size, config.recurrent, config.place_of(layer))

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.mixer(self.norm(x), step))


class Mamba(Decoder):
    block = MambaBlock


def read_mamba(config: Fields) -> ModelConfig:
    return _read(config, "mamba", None)


def read_falcon_mamba(config: Fields) -> ModelConfig:
    return _read(config, "falcon_mamba", config.number("mixer_rms_eps", 1e-6))


def _read(config: Fields, name: str, norm_eps: float | None) -> ModelConfig:
    count, hidden = config.integer("num_hidden_layers", 32), config.integer("hidden_size", 768)
    inner = int(config.number("expand", 2) * hidden)
    if config.integer("intermediate_size", inner) != inner:
        raise config.refuse("intermediate_size", f"must be expand times hidden_size, {inner}")
    selective = Selective(
        read_rank(config, "time_step_rank", hidden), norm_eps, has_bias=config.flag("use_bias", False)
    )
    keys, bias = ("state_size", "conv_kernel"), config.flag("use_conv_bias", True)
    length = config.integer("max_position_embeddings", LENGTH)
    return read_decoder(
        config, name, length, heads=NO_HEADS, rope=Rope(max_position=length), intermediate_size=inner,
        norm_eps=config.number("layer_norm_epsilon", 1e-5), layers_without_rope=tuple(range(count)),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        recurrent=read_selective(config, inner, range(count), keys, selective, has_bias=bias),
    )  # fmt: skip


def read_rank(config: Fields, key: str, hidden: int) -> int:
    """Read the rank of step sizes, by default a sixteenth of the hidden size."""
    return -(-hidden // 16) if config.raw(key) in (None, "auto") else config.integer(key, least=1)


def read_selective(
    config: Fields, inner: int, layers: range | tuple[int, ...], keys: tuple[str, str], selective: Selective,
    *, has_bias: bool,
) -> Recurrent:  # fmt: skip
    """Read Mamba layers with `inner` channels. `keys`: of the size of a channel's state, and of the width of the
    convolution, which has a bias if `has_bias`."""
    refuse_other(config, "hidden_act", "silu")
    state, width = config.integer(keys[0], 16, least=1), check_width(config, keys[1], config.integer(keys[1], 4))
    if state > MOST_STATE_SIZE:
        raise config.refuse(keys[0], f"must be in [1, {MOST_STATE_SIZE}], is {state}")
    return Recurrent(0, inner, state, 1, width, tuple(layers), kind="selective", has_bias=has_bias, selective=selective)


def rename(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name


MAMBA = Family(name="mamba", build=Mamba, read=read_mamba, rename=rename, gguf=GGUF)
FALCON_MAMBA = Family(name="falcon_mamba", build=Mamba, read=read_falcon_mamba, rename=rename)
