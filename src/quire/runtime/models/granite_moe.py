"""Granite's mixtures of experts: Granite with experts in every layer, and in some models a shared expert."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.builder import GATED
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder, read_granite
from quire.runtime.models.family import Family, GgufFamily, Stacked
from quire.runtime.models.hf_config import check_experts
from quire.runtime.models.mixture import MOE_NAMES, MixtralBlock

JOINED, OUT = "input_linear", "output_linear"  # gate and up in one matrix


class GraniteMoeBlock(MixtralBlock):
    names = GATED
    shared = (JOINED, JOINED, OUT)


class GraniteMoe(Decoder):
    block = GraniteMoeBlock


def read_granitemoe(config: Fields) -> ModelConfig:
    return replace(read_granite(config), architecture="granitemoe", experts=read_experts(config))


def read_granitemoeshared(config: Fields) -> ModelConfig:
    experts = replace(read_experts(config), shared_size=config.integer("shared_intermediate_size", 0, least=0))
    return replace(read_granite(config), architecture="granitemoeshared", experts=experts)


def read_experts(config: Fields) -> Experts:
    experts = Experts(
        config.integer("num_local_experts", 8),
        config.integer("num_experts_per_tok", 2),
        config.integer("intermediate_size", 11_008),
    )
    return check_experts(config, experts, ("num_local_experts", "num_experts_per_tok", "intermediate_size"))


def rename_granitemoe(name: str) -> str:
    """Checkpoints store the matrices of all experts in one tensor, and the shared expert beside the mixture."""
    for stored in (JOINED, OUT):
        name = name.replace(f".block_sparse_moe.{stored}.", f".block_sparse_moe.experts.{stored}.")
    name = name.replace(".block_sparse_moe.router.layer.", ".block_sparse_moe.gate.")
    return name.replace(".shared_mlp.", ".block_sparse_moe.shared_expert.")


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = gguf_config.read_scales(fields, config)
    return replace(config, experts=gguf_config.read_experts(fields, config.intermediate_size))


GGUF = GgufFamily(
    inner={name: path.replace("mlp.", "block_sparse_moe.") for name, path in MOE_NAMES.items()},
    has_pairs=True,
    settings=gguf_config.SCALES | set(gguf_config.EXPERTS),
    read=read_gguf,
)
STACKED = {
    f"{JOINED}.weight": Stacked(("gate_proj.weight", "up_proj.weight")),
    f"{OUT}.weight": Stacked(("down_proj.weight",)),
}
GRANITEMOE, GRANITEMOESHARED = (
    Family(name=name, build=GraniteMoe, read=read, rename=rename_granitemoe, stacked=STACKED, gguf=gguf)
    for name, read, gguf in (
        ("granitemoe", read_granitemoe, GGUF), ("granitemoeshared", read_granitemoeshared, None)
    )
)  # fmt: skip
