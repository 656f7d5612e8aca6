"""GGUF files of Mamba and FalconMamba, which have one architecture. Files store the rates as -exp(A_log), and
convolutions as matrices; they have no heads, and their length says nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import Heads, ModelConfig
from quire.config.recurrent import Recurrent, Selective
from quire.kernels.selective import MOST_STATE_SIZE
from quire.runtime.models.family import GgufFamily
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.hf_config import check_width

LENGTH = 32_768
NO_HEADS = Heads(64, 1, 16)  # nothing attends; ranks divide these heads, and blocks of tokens keep their keys
NORM_EPS = 1e-6  # of FalconMamba's step sizes, B and C; files do not store it
_INNER, _STATE, _WIDTH, _RANK = "ssm.inner_size", "ssm.state_size", "ssm.conv_kernel", "ssm.time_step_rank"
_NORMS = "ssm.dt_b_c_rms"


def whole(fields: Fields) -> Fields:
    """Add the heads that nothing uses, and a size of MLPs, for the reader that all families share."""
    heads = {"head_count": NO_HEADS.num_query, "head_count_kv": 1, "key_length": 16, "value_length": 16}
    sizes = {f"attention.{key}": value for key, value in heads.items()}
    return fields.changed(sizes | {"feed_forward_length": fields.integer(_INNER, least=1)})


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    state = fields.integer(_STATE, least=1)
    if state > MOST_STATE_SIZE:
        raise fields.refuse(_STATE, f"must be in [1, {MOST_STATE_SIZE}], is {state}")
    layers, eps = tuple(range(config.num_layers)), NORM_EPS if fields.flag(_NORMS, False) else None
    recurrent = Recurrent(
        0, fields.integer(_INNER, least=1), state, 1, check_width(fields, _WIDTH, fields.integer(_WIDTH)), layers,
        kind="selective", has_bias=True, selective=Selective(fields.integer(_RANK, least=1), eps),
    )  # fmt: skip
    rope = replace(config.rope, max_position=min(config.rope.max_position, LENGTH))
    return replace(config, rope=rope, recurrent=recurrent, layers_without_rope=layers)


def rearrange(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:  # noqa: ARG001
    found, sizes = dict[str, Rearranged](), config.recurrent
    assert sizes is not None
    for layer in sizes.layers:
        rate, mixed = (f"model.layers.{layer}.mixer.{word}" for word in ("A_log", "conv1d.weight"))
        shape = (sizes.value_heads, sizes.key_dim)
        found[rate] = Rearranged({rate: shape}, shape, restore=_log)
        shape = (sizes.channels, sizes.width)
        found[mixed] = Rearranged({mixed: shape}, (sizes.channels, 1, sizes.width))
    return found


def _log(rate: Tensor) -> Tensor:
    return rate.float().neg().log()


GGUF = GgufFamily(
    inner={
        "attn_norm": "norm",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        "ssm_a.": "mixer.A_log",
        "ssm_d.": "mixer.D",
        "ssm_out": "mixer.out_proj",
    },
    settings=frozenset({_INNER, _STATE, _WIDTH, _RANK, _NORMS}), read=read_gguf, whole=whole, rearrange=rearrange,
)  # fmt: skip
