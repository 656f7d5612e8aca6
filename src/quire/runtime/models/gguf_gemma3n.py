"""GGUF files of Gemma 3n. They stack the projections between streams, store thresholds of sparse gates in place of
shares, and have side inputs for all tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from statistics import NormalDist

from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_OUTER, GgufFamily
from quire.runtime.models.gguf_gemma import GEMMA_INNER
from quire.runtime.models.gguf_layout import Rearranged

_ACTIVE, _STREAMS, _THRESHOLDS = "altup.active_idx", "altup.num_inputs", "activation_sparsity_scale"
_SIDE_INPUT = "embedding_length_per_layer_input"
_LAUREL_RANK = 64  # of the published models; files do not store it
_STACKED = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.norm.altup_unembed_projections"}


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    if fields.integer(_ACTIVE, 0) != 0:
        raise fields.refuse(_ACTIVE, "only the first stream (0) can be the one that layers read")
    return replace(
        config, **gguf_config.read_layers(fields, config, _windows(fields)), qk_norm=True,
        local_rope=gguf_config.read_local_rope(fields, config), attention_scale=1.0, activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5, logit_softcap=fields.number(gguf_config.LOGIT_CAP, 30.0),
        per_layer_input=fields.integer(_SIDE_INPUT, least=1), streams=fields.integer(_STREAMS, 4, least=2),
        laurel_rank=_LAUREL_RANK, sparsity=_read_sparsity(fields, config.num_layers),
    )  # fmt: skip


def _read_sparsity(fields: Fields, count: int) -> tuple[float, ...]:
    """Return the share of each layer's gates that are cut to zero. Files store how many standard deviations above the
    mean they are cut; -inf: none is."""
    given = fields.raw(_THRESHOLDS)
    if not isinstance(given, list) or len(given) != count or any(type(one) is not float for one in given):
        raise fields.refuse(_THRESHOLDS, f"must be a number for each of {count} layers")
    shares = tuple(round(NormalDist().cdf(one), 6) for one in given)
    if not all(0 <= one < 1 for one in shares):
        raise fields.refuse(_THRESHOLDS, "must hold numbers that leave some gates")
    return shares if any(shares) else ()


def _windows(fields: Fields) -> tuple[int | None, ...]:
    return gguf_config.read_windows(fields, every=5)


def rearrange(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:  # noqa: ARG001
    """Describe the projections between streams, which files stack."""
    hidden, others = config.hidden_size, config.streams - 1
    return {
        f"{path}.{one}.weight": Rearranged(
            {f"{stored}.weight": (others, hidden, hidden)}, (hidden, hidden), restore=partial(_take, one)
        )
        for stored, path in _STACKED.items()
        for one in range(others)
    }


def _take(number: int, whole: Tensor) -> Tensor:
    return whole[number]


GGUF = GgufFamily(
    outer=GGUF_OUTER | {
        "output_norm.weight": "model.norm.norm.weight",
        "per_layer_token_embd.weight": "model.side_inputs.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.side_inputs.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.side_inputs.per_layer_projection_norm.weight",
    } | {f"{stored}.weight": f"{stored}.weight" for stored in _STACKED},
    inner=GEMMA_INNER | {
        "inp_gate": "side_input.per_layer_input_gate",
        "proj": "side_input.per_layer_projection",
        "post_norm": "side_input.post_per_layer_input_norm",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    settings=gguf_config.LAYERS | {
        gguf_config.WINDOW, gguf_config.PATTERN, gguf_config.LOCAL_THETA, gguf_config.LOGIT_CAP, _ACTIVE, _STREAMS,
        _THRESHOLDS, _SIDE_INPUT,
    },
    read=read_gguf, whole=lambda fields: gguf_config.whole_numbers(fields, _windows(fields)), rearrange=rearrange,
)  # fmt: skip
