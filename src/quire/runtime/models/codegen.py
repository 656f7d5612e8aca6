"""CodeGen: GPT-J with queries, values and keys in one matrix, which checkpoints store in four parts of neighbouring
heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.weights import stored_for
from quire.runtime.models.family import Family
from quire.runtime.models.gpt2 import rename_gpt2
from quire.runtime.models.gptj import GPTJ, Gptj, GptjBlock, read_gptj

_PARTS = 4


class CodeGenBlock(GptjBlock):
    def make_qkv(self, config: ModelConfig, build: LayerBuilder) -> Linear:
        hidden, heads = config.hidden_size, config.heads
        stored = torch.arange(3 * hidden).view(_PARTS, 3, -1)  # of each part: queries, values, keys
        queries, values, keys = (rows.flatten() for rows in stored.unbind(1))
        own, in_order = build.query_outputs(heads, heads.dim), stored_for(config.rope, heads.dim).in_order
        rows: list[Tensor] = [own.of(each) for each in (in_order(queries), in_order(keys), values)]
        return build.ordered_linear("qkv_proj", hidden, 3 * hidden, torch.cat(rows))


class CodeGen(Gptj):
    block = CodeGenBlock


def read_codegen(config: Fields) -> ModelConfig:
    found = read_gptj(config)
    if found.heads.num_query % _PARTS:
        raise config.refuse("n_head", f"must be a multiple of {_PARTS}, is {found.heads.num_query}")
    return replace(found, architecture="codegen")


CODEGEN = Family(name="codegen", build=CodeGen, read=read_codegen, rename=rename_gpt2, embedding=GPTJ.embedding)
