"""EmbeddingGemma: the text model of Gemma 3 as an encoder. Its tokens see later ones too; windows reach to both
sides."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.texts import Texts
from quire.runtime.models.base import BaseEncoder
from quire.runtime.models.family import Family
from quire.runtime.models.gemma import NORM_OFFSET, GemmaBlock, read_gemma3
from quire.runtime.models.hf_rope import refuse_changing

BIDIRECTIONAL = "use_bidirectional_attention"


class EmbeddingGemma(BaseEncoder):
    head = None

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self._scale = build.rounded(config.embedding_scale)
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GemmaBlock(config, layer, build) for layer in range(config.num_layers))
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps, NORM_OFFSET)

    def forward(self, texts: Texts) -> Tensor:
        stream = Stream(self.embed_tokens(texts.token_ids).mul_(self._scale))
        for block in self.layers:
            block(stream, texts)
        x: Tensor = self.norm.of(stream.settle())
        return x


def read(config: Fields) -> ModelConfig:
    """Read the config. A window of w tokens reaches w // 2 tokens to each side."""
    if config.raw(BIDIRECTIONAL) is not True:
        fix = "supported: true, as in EmbeddingGemma; to generate, use Gemma3ForCausalLM"
        raise config.refuse(BIDIRECTIONAL, "this class is only read as an encoder", fix=fix)
    numbers = read_gemma3(config.changed({BIDIRECTIONAL: None}))
    if numbers.attention_softcap is not None:
        raise config.refuse("attn_logit_softcapping", "is not supported in encoders", fix="supported: null")
    for rope in (numbers.rope, numbers.local_rope):
        refuse_changing(config, rope)
    windows = tuple(None if window is None else window // 2 * 2 + 1 for window in numbers.windows)
    return replace(numbers, architecture="embedding_gemma", encoder=Encoder(has_positions=False), windows=windows)


def rename(name: str) -> str:
    return name.removeprefix("model.")


EMBEDDING_GEMMA = Family(
    name="embedding_gemma", build=EmbeddingGemma, read=read, rename=rename, embedding="embed_tokens.weight"
)
