"""GPTBigCode (StarCoder 1, SantaCoder): GPT-2 with matrices as they are multiplied, and usually one key/value head."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Heads, ModelConfig
from quire.runtime.layers.weights import SAME_LAYOUT, Stored
from quire.runtime.models.family import Family
from quire.runtime.models.gpt2 import GPT2, Gpt2, Gpt2Block, read_gpt2, rename_gpt2


class BigCodeBlock(Gpt2Block):
    stored = SAME_LAYOUT

    def stored_qkv(self, config: ModelConfig) -> Stored:
        """Without multi-query attention, the rows of each head's query, key and value are together."""
        return SAME_LAYOUT if config.heads.num_kv == 1 else Stored(grouped=config.heads)


class BigCode(Gpt2):
    block = BigCodeBlock


def read_gpt_bigcode(config: Fields) -> ModelConfig:
    found = read_gpt2(config)
    heads = found.heads
    num_kv = 1 if config.flag("multi_query", True) else heads.num_query
    return replace(found, architecture="gpt_bigcode", heads=Heads(heads.num_query, num_kv, heads.dim))


assert GPT2.gguf is not None
GPT_BIGCODE = Family(
    name="gpt_bigcode", build=BigCode, read=read_gpt_bigcode, rename=rename_gpt2, embedding=GPT2.embedding,
    gguf=replace(GPT2.gguf, transposed=False),
)  # fmt: skip
