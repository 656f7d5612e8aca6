"""The shape of a model: sizes and options as read from config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
Dtype = Literal["float32", "bfloat16", "float16"]
CacheDtype = Literal["float32", "bfloat16", "float16", "float8"]  # float8 is e4m3fn
Quantization = Literal["fp8"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of grouped-query attention: `num_query` query heads share `num_kv` key/value heads of size `dim`."""

    num_query: int
    num_kv: int
    dim: int

    @property
    def query_size(self) -> int:
        return self.num_query * self.dim

    @property
    def kv_size(self) -> int:
        return self.num_kv * self.dim


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, half-split layout. `scaling` holds the parameters of `kind` by their HF names."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    max_position: int = 2_048  # the sequence length that the model was trained for
    frequency_factors: tuple[float, ...] = ()  # dim / 2 divisors of the default frequencies; (): none


@dataclass(frozen=True, slots=True)
class StoredLevels:
    """The weights that the model's file stores quantized and that kernels can multiply as stored: their number, and
    their bytes in memory."""

    parameters: int = 0
    num_bytes: int = 0


def packed_bytes(num_weights: int, *, nibbles: bool) -> int:
    """Return the bytes of quantized weights: a group of 32 takes 16 bytes (nibbles) or 32, a scale and an offset."""
    return num_weights // 32 * (20 if nibbles else 36)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary positions and a gated MLP."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: Heads
    rope: Rope
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: Dtype = "bfloat16"  # the checkpoint's dtype
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = field(default=())
    levels: StoredLevels = field(default_factory=StoredLevels)

    @property
    def layer_weights(self) -> tuple[int, int]:
        """The number of weights in the matrices of all layers, which fp8 quantization shrinks, and of their output
        features, each of which has a scale."""
        h, q, kv, i = self.hidden_size, self.heads.query_size, self.heads.kv_size, self.intermediate_size
        numbers, outputs = h * (q + 2 * kv) + q * h + 3 * h * i, (q + 2 * kv) + h + 2 * i + h
        return self.num_layers * numbers, self.num_layers * outputs

    @property
    def num_parameters(self) -> int:
        h, q, kv, i = self.hidden_size, self.heads.query_size, self.heads.kv_size, self.intermediate_size
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv) * self.qkv_bias + h * self.o_bias
        attention += 2 * self.heads.dim * self.qk_norm
        mlp = 3 * h * i + (2 * i + h) * self.mlp_bias
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * h) + h
