"""The shape of a model: sizes and options as read from config.json or GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from quire.config.indexer import Indexer
from quire.config.kv_cache import KVCacheSpec
from quire.config.recurrent import Recurrent
from quire.config.vision import Vision
from quire.config.weight_counts import StoredLevels, WeightCounts

Dtype = Literal["float32", "bfloat16", "float16"]
CacheDtype = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]  # float8 is e4m3fn
Quantization = Literal["fp8", "int8", "int4"]  # to which plain weights are quantized while they are loaded
CpuWeights = Literal["integer", "integer8", "integer16", "float"]  # arithmetic of a CPU's quantized gemms
QUANTIZATIONS: tuple[Quantization, ...] = ("fp8", "int8", "int4")
# Methods of quantized checkpoints:
STORED_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4", "bitnet")
QUERY_SCALE = "llama_4_scaling_beta"  # parameter of rotary positions that also scale queries
INT4_GROUP = 64  # int4 weights per scale and offset
# For the KV cache: bytes per cache entry, see `stored_specs`.
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1, "int4": 1}


@dataclass(frozen=True, slots=True)
class Heads:
    """Grouped-query attention: `num_query` query heads share `num_kv` key/value heads of size `dim`.

    With latent attention all heads share one vector of `dim` elements per token: it is the key, and its first elements
    the value.
    """

    num_query: int
    num_kv: int
    dim: int
    latent: int | None = None  # size of the value within that vector; None: values are stored apart from keys

    @property
    def query_size(self) -> int:
        return self.num_query * self.dim

    @property
    def kv_size(self) -> int:
        return self.num_kv * self.dim

    @property
    def value_dim(self) -> int:
        return self.dim if self.latent is None else self.latent

    @property
    def sides(self) -> int:
        """How many vectors of `kv_size` elements are kept per token: key and value, or one latent."""
        return 2 if self.latent is None else 1


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention. One vector is kept per token: `rank` elements from which the keys and values of all
    heads are computed, and `rope_dim` elements of the key that are rotated."""

    rank: int
    nope_dim: int  # elements of a query or key that are not rotated
    rope_dim: int  # elements of a query or key that are rotated
    value_dim: int  # per head
    query_rank: int | None = None  # size of the query's latent; None: queries are computed from the hidden state

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def scaled_dim(self) -> int:
        """Width of the table that scales queries by their position: a divisor of a query's elements."""
        return math.gcd(self.query_dim, 16)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, half-split layout. `scaling` holds the parameters of `kind` by their HF names."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    max_position: int = 2_048  # the sequence length that the model was trained for
    frequency_factors: tuple[float, ...] = ()  # dim / 2 divisors of the default frequencies; (): none
    long_factors: tuple[float, ...] = ()  # used instead in sequences longer than the original length (longrope)
    dim: int | None = None  # rotate the first `dim` elements of each head; None: all
    in_pairs: bool = False  # in checkpoints rotated pairs are adjacent, not in two halves
    # Multi-axis positions (mRoPE): a token has a position in time, height and width. sections[i] frequencies use axis
    # i, in this order and repeated. (): tokens have one position.
    sections: tuple[int, ...] = ()

    @property
    def scales_queries(self) -> bool:
        return bool(dict(self.scaling).get(QUERY_SCALE))


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """The query at position p is multiplied by 1 + beta * log(1 + floor((p + offset) / length))."""

    beta: float
    length: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Alibi:
    """Biases of attention scores that fall with the distance to a key, each head with a slope of its own."""

    most: float = 8.0  # the slopes fall geometrically to 2 ** -most
    factor: float = 1.0  # on the slopes

    def slopes(self, heads: int) -> list[float]:
        """Return the slope of each of this many query heads. If their number is no power of two, the last ones have
        every other slope of twice as many heads as the next lower power of two."""
        whole = 1 << heads.bit_length() - 1
        powers = [(i + 1) / whole for i in range(whole)] + [(i + 0.5) / whole for i in range(heads - whole)]
        return [self.factor * 2.0 ** (-self.most * power) for power in powers]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP. The router sends each token to its `num_used` highest-ranked
    experts."""

    num: int
    num_used: int
    size: int  # intermediate size of one expert
    shared_size: int = 0  # intermediate size of the shared expert; 0: none
    shared_has_gate: bool = False  # the shared expert's output is multiplied by a sigmoid gate
    is_normalized: bool = True  # a token's expert weights are divided by their sum
    scale: float = 1.0  # factor on the expert weights of a token
    num_groups: int = 1  # groups of neighbouring experts; a token uses experts of its best `groups_used` groups
    groups_used: int = 1
    by_sigmoid: bool = False  # rank experts by sigmoid plus learned bias (groups by their best two), not by softmax
    biased_softmax: bool = False  # rank experts by softmax plus learned bias
    scales_inputs: bool = False  # the sigmoid of the only used expert's logit multiplies its input, not its output
    dense_layers: tuple[int, ...] = ()  # layers with a plain MLP instead of experts
    beside_mlp: bool = False  # layers have a plain MLP besides the experts
    has_bias: bool = False  # of the router and of the experts' matrices
    is_gated: bool = True  # experts and shared expert are gated MLPs; False: down(activation(up(x)))
    clamp: tuple[float, float, float] | None = None  # of the gate: limit, alpha and shift; see `kernels/clamp.py`
    mixer_jitter: float | None = None  # a token's two experts are chosen by `sparse_mixer`, with this jitter
    latent_size: int = 0  # experts read and write vectors of this size, between two projections; 0: hidden states
    held: int | None = None  # number of whole experts on this rank (expert parallelism); None: all

    def width(self, hidden: int) -> int:
        """Return the size of what routed experts read and write, given that of hidden states."""
        return self.latent_size or hidden

    @property
    def has_score_bias(self) -> bool:
        """Whether a learned bias is added to scores when experts are ranked."""
        return self.by_sigmoid or self.biased_softmax


@dataclass(frozen=True, slots=True)
class Encoder:
    """The options that only encoders have: `num_types` token types, each with an embedding (0: none); a position table
    that starts at line `position_offset`, or none at all; and for classifiers a head with `num_labels` logits."""

    num_types: int = 0
    position_offset: int = 0
    num_labels: int = 0  # 0: no head
    head_activation: str = "tanh"  # between the two linear layers of the head
    has_positions: bool = True  # False: positions are rotary
    embedding_size: int = 0  # of embeddings, which are projected to the hidden size; 0: they have that size
    norm_bias: bool = True  # of layer norms
    head_bias: bool = True  # of the first layer of the head
    has_distance_bias: bool = False  # a learned term of attention scores by the distance of two tokens


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The options that only EAGLE-3 heads have: one layer that drafts tokens from hidden states of its target model."""

    vocab_size: int  # tokens it can draft; if fewer than the target has, the checkpoint maps them
    layers: tuple[int, ...] = ()  # the target's layers whose inputs it reads; (): the usual three
    norms_stream: bool = False  # the residual stream starts from the normed hidden state

    @property
    def num_states(self) -> int:
        """Hidden states per token that it reads."""
        return len(self.layers) or 3


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Set for a multi-token-prediction head: one layer in the checkpoint of its target model that drafts tokens from
    the target's last hidden states."""

    prefix: str  # with which the names of its tensors begin


SUPER_BLOCK = 256  # weights of neighbouring inputs in a super-block of Q2_K and Q3_K, whose factors share a scale
MXFP4 = "mxfp4"  # the quantization of gpt-oss


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and options of a decoder-only transformer or of an encoder. Properties that all models of a family
    share are in its file in `runtime/models`."""

    architecture: str  # name of the model family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: Heads  # of layers without a window; for the others see `local_heads`
    rope: Rope
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"] = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False  # of the output head
    qk_norm: bool = False
    head_layer_norms: bool = False  # query and key heads have layer norms, each its own
    qkv_limit: float | None = None  # on the absolute values of queries, keys and values
    attention_sinks: bool = False  # each query head has an extra learned score without a value
    # Per layer: tokens that a token sees, itself included, before it or, in encoders, on both sides; (): no windows.
    windows: tuple[int | None, ...] = ()
    has_chunks: bool = False  # windows are chunks: texts are divided into them, and a token sees those of its own
    alibi: Alibi | None = None  # biases in place of positions
    local_rope: Rope | None = None  # of layers with a window, if it differs
    local_heads: Heads | None = None  # of layers with a window, if they differ; same number of query heads
    layers_without_rope: tuple[int, ...] = ()
    query_scaling: QueryScaling | None = None  # of layers without rotary positions
    kv_layers: tuple[int, ...] = ()  # per layer: the layer whose keys and values it reads; (): its own
    keys_are_values: bool = False  # in layers without a window, one projection gives both keys and values
    token_size: int = 0  # of embeddings that are projected to the hidden size, and back in front of the head; 0: none
    norms_last: bool = False  # layer norms follow the residual additions, and the last block has no norm behind it
    per_layer_input: int = 0  # size of the per-layer embedding that each layer reads besides the residual
    per_layer_vocab: int = 0  # tokens with such an embedding; others have that of token 0; 0: all
    streams: int = 1  # residual streams, of which layers read the first and change all (AltUp)
    laurel_rank: int = 0  # of a residual addition of low rank beside attention (LAuReL); 0: none
    sparsity: tuple[float, ...] = ()  # per layer: share of an MLP's gates that are cut to zero; (): none
    double_wide: bool = False  # layers that read another layer's keys have an MLP of twice the size
    attention_scale: float | None = None  # None: 1 / sqrt(heads.dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor on each layer's output before the residual add
    logit_scale: float = 1.0
    parallel_residual: bool = False  # attention and MLP read the same residual (for families with both forms)
    shared_norm: bool = False  # and through the same norm (likewise)
    context_limit: tuple[str, int] | None = None  # key of config.json, and most tokens for which attention is exact
    experts: Experts | None = None
    latent: Latent | None = None  # latent attention; `heads` then attend to the latents
    indexer: Indexer | None = None  # chooses the latents that a token attends to; None: all
    encoder: Encoder | None = None  # None: a decoder
    recurrent: Recurrent | None = None  # None: all layers are attention layers
    mlp_layers: tuple[int, ...] = ()  # layers that are an MLP or a mixture of experts and nothing else
    mlp_factors: tuple[float, float] | None = None  # on the gates of MLPs before the activation, and on their outputs
    vision: Vision | None = None  # None: the model takes no images
    num_labels: int = 0  # labels of a decoder that classifies texts by their last token; 0: no head for them
    eagle: EagleHead | None = None  # set for an EAGLE head; None: a complete model
    mtp: MtpHead | None = None  # set for a multi-token-prediction head; None: a complete model
    attention_gate: bool = False  # attention outputs are multiplied by a sigmoid gate of the token
    dtype: Dtype = "bfloat16"  # the checkpoint's dtype
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = field(default=())
    quantization: str | None = None  # quantization method of a Hugging Face checkpoint; None: not quantized
    levels: StoredLevels = field(default_factory=StoredLevels)
    weights: WeightCounts = field(default_factory=WeightCounts)
    rank_weights: WeightCounts | None = None  # of the tensor-parallel rank with most; None: not counted
    stage: tuple[int, int] | None = None  # pipeline stage: first layer, and last layer + 1; None: all layers
    head_layers: tuple[int, ...] | None = None  # of a stage: layers whose inputs a draft head reads; None: no head

    @property
    def embedding_size(self) -> int:
        """Elements of a token's embedding, and of the vector that the output head multiplies."""
        return self.token_size or self.hidden_size

    @property
    def stream_size(self) -> int:
        """Elements of a token in all residual streams."""
        return self.streams * self.hidden_size

    @property
    def head_vocab_size(self) -> int:
        return self.vocab_size if self.eagle is None else self.eagle.vocab_size

    @property
    def layers(self) -> range:
        """The layers of this stage; without stages, all layers."""
        return range(*self.stage) if self.stage is not None else range(self.num_layers)

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage has the last norm and the output head."""
        return self.layers.stop == self.num_layers

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None: it has none."""
        if self.alibi is not None or layer in self.layers_without_rope:
            return None
        return self.local_rope if self.local_rope is not None and self.window_of(layer) is not None else self.rope

    def heads_of(self, layer: int) -> Heads:
        return self.local_heads if self.local_heads is not None and self.window_of(layer) is not None else self.heads

    @property
    def all_heads(self) -> tuple[Heads, ...]:
        """The kinds of heads of the layers, each once, beginning with `heads`."""
        return (self.heads,) if self.local_heads is None else (self.heads, self.local_heads)

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token sees in a layer, itself included; None: all."""
        return self.windows[layer] if self.windows else None

    def kv_layer_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def sparsity_of(self, layer: int) -> float:
        return self.sparsity[layer] if self.sparsity else 0.0

    def mlp_size_of(self, layer: int) -> int:
        is_wide = self.double_wide and self.kv_layer_of(layer) != layer
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """What each layer of the stage keeps for later tokens, except layers that read the keys of another layer."""
        specs = tuple(spec for layer in self.layers for spec in self._specs_of(layer))
        if any(map(self.attends, range(self.num_layers))):
            return specs
        heads = self.heads  # of a model without attention: their blocks only name tokens, whose states are kept
        return (*specs, KVCacheSpec("full", heads.sides * heads.kv_size, unit=heads.sides * heads.dim))

    def _specs_of(self, layer: int) -> Iterator[KVCacheSpec]:
        if self.recurrent is not None and self.is_recurrent(layer):
            yield KVCacheSpec("state", state_bytes=self.recurrent.state_numbers * DTYPE_BYTES["float32"])
        if self.attends(layer) and self.kv_layer_of(layer) == layer:
            yield self._attention_spec(layer)

    def _attention_spec(self, layer: int) -> KVCacheSpec:
        heads, window = self.heads_of(layer), self.window_of(layer)
        numbers, unit = heads.sides * heads.kv_size, heads.sides * heads.dim
        if self.latent is not None:
            own = None if self.indexer is None or layer not in self.indexer.layers else self.indexer
            return KVCacheSpec("latent", numbers, unit=unit, index=0 if own is None else own.dim)
        if window is None:
            return KVCacheSpec("full", numbers, unit=unit)
        return KVCacheSpec("window", numbers, window, unit=unit, is_chunked=self.has_chunks)

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer in self.recurrent.layers

    def attends(self, layer: int) -> bool:
        beside = self.recurrent is not None and self.recurrent.beside_attention
        return layer not in self.mlp_layers and (beside or not self.is_recurrent(layer))

    def place_of(self, layer: int) -> int:
        """Return the index of a layer among the layers of its stage that keep the same kind of thing: states, or
        entries per token."""
        kind, others = self.is_recurrent(layer), range(self.layers.start, layer)
        keeps = (one for one in others if self.kv_layer_of(one) == one and one not in self.mlp_layers)
        return sum(self.is_recurrent(one) == kind for one in keeps)

    @property
    def states_read(self) -> int:
        """Hidden states of the target per token that a draft head joins; 0: no draft head."""
        own = 0 if self.eagle is None else self.eagle.num_states
        return own if self.mtp is None else 2  # a hidden state and an embedding

    @property
    def layer_weights(self) -> tuple[int, int]:
        """The weights in the matrices of all blocks, and their output features."""
        return self.weights.in_blocks, self.weights.block_outputs

    @property
    def num_parameters(self) -> int:
        return self.weights.parameters

    @property
    def num_active(self) -> int:
        """The weights used per token: all but those of experts that a token is not routed to. On a rank with whole
        experts, the average over tokens."""
        if self.experts is None:
            return self.num_parameters
        num, held = self.experts.num, self.experts.num if self.experts.held is None else self.experts.held
        others = (num - self.experts.num_used) * held
        mixtures = self.num_layers - len(self.experts.dense_layers)
        hidden, size = self.experts.width(self.hidden_size), self.experts.size
        firsts = 2 if self.experts.is_gated else 1  # matrices in front of the activation
        biases = firsts * size + hidden if self.experts.has_bias else 0
        return self.num_parameters - mixtures * others * ((firsts + 1) * hidden * size + biases) // num
