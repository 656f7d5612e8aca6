"""The shape of a model: sizes and options as read from config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.config.kv_cache import KVCacheSpec
from quire.config.vision import Vision

Dtype = Literal["float32", "bfloat16", "float16"]
CacheDtype = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]  # float8 is e4m3fn
Quantization = Literal["fp8", "int8", "int4"]  # of plain weights, while they are loaded
CpuWeights = Literal["integer", "integer8", "integer16", "float"]  # how a CPU multiplies by quantized weights
QUANTIZATIONS: tuple[Quantization, ...] = ("fp8", "int8", "int4")
STORED_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")  # of quantized checkpoints
INT4_GROUP = 64  # weights of int4 that share a scale and an offset
# Of the KV cache: bytes of an entry, see `stored_specs`.
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1, "int4": 1}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of grouped-query attention: `num_query` query heads share `num_kv` key/value heads of size `dim`.

    Heads over latents share one vector of `dim` numbers for each token: it is the key, and its first numbers the value.
    """

    num_query: int
    num_kv: int
    dim: int
    latent: int | None = None  # how many of these numbers are the value; None: values are kept apart from keys

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
        """How many vectors of `kv_size` numbers are kept of a token."""
        return 2 if self.latent is None else 1


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: of each token one vector is kept, `rank` numbers that keys and values of all heads
    are made of, and `rope_dim` numbers of the key that tell its position."""

    rank: int
    nope_dim: int  # numbers of a query or key that are not rotated
    rope_dim: int  # and those that are
    value_dim: int  # of a head
    query_rank: int | None = None  # queries are made of a vector of this size; None: of the token itself

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, half-split layout. `scaling` holds the parameters of `kind` by their HF names."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    max_position: int = 2_048  # the sequence length that the model was trained for
    frequency_factors: tuple[float, ...] = ()  # dim / 2 divisors of the default frequencies; (): none
    long_factors: tuple[float, ...] = ()  # in their place in sequences past the original length (longrope)
    dim: int | None = None  # how many numbers of each head are rotated, the first ones; None: all
    in_pairs: bool = False  # checkpoints store those that are rotated together side by side, not as two halves
    # Multi-axis positions (mRoPE): a token has one for time, height and width, and so many frequencies turn by each, in
    # this order and over again. (): tokens have one position.
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP: a token goes to the `num_used` experts that its router ranks first."""

    num: int
    num_used: int
    size: int  # the intermediate size of one
    shared_size: int = 0  # of the expert that every token goes to; 0: there is none
    shared_has_gate: bool = False  # its part is multiplied by the sigmoid of a logit of the token
    is_normalized: bool = True  # a token's weights are divided by their sum: a softmax over its experts alone
    scale: float = 1.0  # of the weights of a token's experts
    num_groups: int = 1  # of experts, side by side; a token's experts are of the `groups_used` that rank first
    groups_used: int = 1
    by_sigmoid: bool = False  # experts rank by sigmoids plus a learned bias, groups by their best two; not by a softmax
    dense_layers: tuple[int, ...] = ()  # that have a plain MLP
    beside_mlp: bool = False  # layers have a plain MLP too
    has_bias: bool = False  # the router and the experts' matrices
    clamp: tuple[float, float, float] | None = None  # of the gate: limit, alpha and shift, see `kernels/clamp.py`
    held: int | None = None  # by a rank that has whole experts; None: all


@dataclass(frozen=True, slots=True)
class Encoder:
    """What only encoders have: `num_types` kinds of tokens, each with a vector that is added (0: none), and a table of
    positions whose first one is in line `position_offset`. Classifiers have a head that gives `num_labels` logits."""

    num_types: int = 0
    position_offset: int = 0
    num_labels: int = 0  # 0: no head
    head_activation: str = "tanh"  # between the two products of the head


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The layers that keep a state of fixed size in place of keys and values: gated delta nets. Of queries, keys and
    values a token's own and those of `width` - 1 tokens before are mixed first, which are part of the state."""

    key_heads: int
    value_heads: int  # a multiple of key_heads, which they share
    key_dim: int
    value_dim: int
    width: int  # of the convolution
    layers: tuple[int, ...]  # that are recurrent; all others attend
    joined: bool = False  # checkpoints have what a key head and its value heads need side by side, in two matrices

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The numbers of a token that are convolved: query, key and value heads."""
        return 2 * self.key_size + self.value_size

    @property
    def state_numbers(self) -> int:
        """Of one layer, all of them float32: a matrix for each value head, then the last inputs of the convolution."""
        return self.value_size * self.key_dim + (self.width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class EagleHead:
    """What only EAGLE-3 heads have: one layer that drafts tokens from hidden states of another model, its target."""

    vocab_size: int  # tokens that it can draft; fewer than the target's vocabulary: a map says which
    layers: tuple[int, ...] = ()  # the target's layers whose inputs it reads; (): the usual three
    norms_stream: bool = False  # the normed hidden state is the residual stream, not the hidden state itself

    @property
    def num_states(self) -> int:
        """How many hidden states of a token it reads."""
        return len(self.layers) or 3


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """How many weights the layers of a model hold, as the layers themselves say: all of them; those in the matrices of
    blocks, which quantization shrinks; and the output features of these matrices, each of which has a scale. Of linear
    layers that LoRA adapters may change: the inputs of all matrices and the outputs; the most matrices of a layer; the
    inputs and outputs of routed experts, which they may change too where the settings say so. Of the matrices that a
    GPU holds quantized if quantization is int4: the weights, and their bytes. `plain_linears`: the weights of linear
    layers that quantization does not shrink, such as an untied output head."""

    parameters: int = 0
    in_blocks: int = 0
    block_outputs: int = 0
    adapter_width: int = 0
    adapter_parts: int = 0
    adapter_expert_width: int = 0
    int4_parameters: int = 0
    int4_bytes: int = 0
    plain_linears: int = 0


@dataclass(frozen=True, slots=True)
class StoredLevels:
    """The weights that the model's file stores quantized and that kernels can multiply as stored: their number, and
    their bytes in memory, with the native CPU kernels, with their integer products (0: these do not multiply them), and
    with the Triton kernels. `gpu_is_float8`: these need a GPU that multiplies float8.

    `has_table`: the embedding table may be one of them; `table_bytes`: what tables take on top of `num_bytes`, a byte
    for each weight and their factors. `expanded`: the weights that a CPU expands to numbers, which bfloat16 does not
    hold exactly. Where ranks cut super-blocks, these are held in groups of 16: `cut_heads_bytes` and `cut_sizes_bytes`
    are what integer products then take on top, for matrices whose inputs are heads, and an intermediate size."""

    parameters: int = 0
    num_bytes: int = 0
    integer_bytes: int = 0
    gpu_parameters: int = 0
    gpu_bytes: int = 0
    gpu_is_float8: bool = False
    has_table: bool = True
    table_bytes: int = 0
    expanded: int = 0
    cut_heads_bytes: int = 0
    cut_sizes_bytes: int = 0


SUPER_BLOCK = 256  # weights of neighbouring inputs whose factors share a scale in Q2_K and Q3_K
MXFP4 = "mxfp4"  # the quantization of gpt-oss
MXFP4_GROUP = 32  # weights of neighbouring inputs that have one scale


def packed_bytes(num_weights: int, *, nibbles: bool) -> int:
    """Return the bytes of quantized weights: a group of 32 takes 16 bytes (nibbles) or 32, a scale and an offset."""
    return num_weights // 32 * (20 if nibbles else 36)


def integer_bytes(num_weights: int, least: int, most: int, *, has_offsets: bool, group: int) -> int:
    """Return the bytes of quantized weights in the panels of integer products, the most that levels between `least` and
    `most` can take. `group`: so many weights have a scale and, where there are such, an offset."""
    halves = group < 32
    widths = ((4,) if has_offsets else (4, 6)) if halves else (4, 5, 6)  # those that there are kernels for, below 8
    bits = next((bits for bits in widths if _fits(bits, least, most, has_offsets=has_offsets)), 8)
    shared = 128 if bits == 4 and group % 128 == 0 else 16 if halves else 32  # weights that share factors there
    return num_weights * bits // 8 + num_weights // shared * 2 * (1 + has_offsets)


def table_bytes(num_weights: int, outputs: int) -> int:
    """Return the bytes of weights in such panels that have at most 16 levels: 16 outputs have a table of 64 bytes."""
    return num_weights // 32 * 18 + 4 * outputs


def super_block_bytes(num_weights: int, bits: int, *, has_offsets: bool) -> int:
    """Return the bytes of weights in such panels whose factors are held as super-blocks: a byte for 16 weights, and a
    float16 scale, perhaps an offset too, for 256."""
    return num_weights * bits // 8 + num_weights // 16 + num_weights // 256 * 2 * (1 + has_offsets)


def _fits(bits: int, least: int, most: int, *, has_offsets: bool) -> bool:
    middle = 0 if has_offsets else 1 << (bits - 1)  # the level that is the number 0
    return least + middle >= 0 and most + middle < 1 << bits


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of a decoder-only transformer, or of an encoder. What a family of models always has is said by its
    file in `runtime/models`, not here."""

    architecture: str  # the family's name
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: Heads  # of the layers that see all tokens, where those with a window have others
    rope: Rope
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False  # each query head has a score without a value
    windows: tuple[int | None, ...] = ()  # of each layer: a token sees so many, itself included; (): all layers see all
    local_rope: Rope | None = None  # of the layers with a window, where it differs
    local_heads: Heads | None = None  # likewise; as many query heads
    layers_without_rope: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()  # of each layer: the one whose keys and values it reads; (): its own
    keys_are_values: bool = False  # in layers that see all: one product gives both
    per_layer_input: int = 0  # numbers that each layer reads of a token beside the stream
    double_wide: bool = False  # layers that read the keys of others have an MLP of twice the size
    attention_scale: float | None = None  # None: 1 / sqrt(heads.dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what every layer adds
    logit_scale: float = 1.0
    parallel_residual: bool = False  # attention and MLP read the same stream; where a family has both forms
    shared_norm: bool = False  # by the same norm; likewise
    experts: Experts | None = None
    latent: Latent | None = None  # of attention over latents; `heads` are those that attend to them
    encoder: Encoder | None = None  # None: a decoder
    recurrent: Recurrent | None = None  # None: all layers attend
    vision: Vision | None = None  # None: the model takes no images
    num_labels: int = 0  # of a decoder that classifies texts by their last token; 0: it generates text
    eagle: EagleHead | None = None  # None: a whole model, no head of another one
    attention_gate: bool = False  # what a token has read is multiplied by the sigmoid of logits of its own
    dtype: Dtype = "bfloat16"  # the checkpoint's dtype
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = field(default=())
    quantization: str | None = None  # the method by which a Hugging Face checkpoint stores weights quantized
    levels: StoredLevels = field(default_factory=StoredLevels)
    weights: WeightCounts = field(default_factory=WeightCounts)
    rank_weights: WeightCounts | None = None  # of the rank that holds most, where ranks share layers; None: not counted
    stage: tuple[int, int] | None = None  # of a pipeline: its first layer, and the one behind its last; None: all

    @property
    def layers(self) -> range:
        """The layers that this stage has; all of them where there are no stages."""
        return range(*self.stage) if self.stage is not None else range(self.num_layers)

    @property
    def is_first_stage(self) -> bool:
        """Whether it embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.layers.stop == self.num_layers

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary positions of a layer; None: it has none."""
        if layer in self.layers_without_rope:
            return None
        return self.local_rope if self.local_rope is not None and self.window_of(layer) is not None else self.rope

    def heads_of(self, layer: int) -> Heads:
        return self.local_heads if self.local_heads is not None and self.window_of(layer) is not None else self.heads

    @property
    def all_heads(self) -> tuple[Heads, ...]:
        """The heads that layers have, each once: those of `heads` first."""
        return (self.heads,) if self.local_heads is None else (self.heads, self.local_heads)

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token of a layer sees, itself included; None: all."""
        return self.windows[layer] if self.windows else None

    def kv_layer_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def mlp_size_of(self, layer: int) -> int:
        is_wide = self.double_wide and self.kv_layer_of(layer) != layer
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """What the layers of the stage keep for later tokens: all but those that read the keys and values of others."""
        return tuple(self._spec_of(layer) for layer in self.layers if self.kv_layer_of(layer) == layer)

    def _spec_of(self, layer: int) -> KVCacheSpec:
        if self.is_recurrent(layer):
            assert self.recurrent is not None
            return KVCacheSpec("state", state_bytes=self.recurrent.state_numbers * DTYPE_BYTES["float32"])
        heads, window = self.heads_of(layer), self.window_of(layer)
        numbers, unit = heads.sides * heads.kv_size, heads.sides * heads.dim
        if self.latent is not None:
            return KVCacheSpec("latent", numbers, unit=unit)
        return KVCacheSpec("full" if window is None else "window", numbers, window, unit=unit)

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer in self.recurrent.layers

    def place_of(self, layer: int) -> int:
        """The layer's number among those of its stage that keep what it keeps: states, or something of every token."""
        kind, first = self.is_recurrent(layer), self.layers.start
        return sum(self.is_recurrent(one) == kind and self.kv_layer_of(one) == one for one in range(first, layer))

    @property
    def layer_weights(self) -> tuple[int, int]:
        """The number of weights in the matrices of all blocks, and of their output features."""
        return self.weights.in_blocks, self.weights.block_outputs

    @property
    def num_parameters(self) -> int:
        return self.weights.parameters

    @property
    def num_active(self) -> int:
        """The number of weights that a token meets: all but those of experts it does not go to. On a rank that has
        whole experts, as many as a token meets on average."""
        if self.experts is None:
            return self.num_parameters
        num, held = self.experts.num, self.experts.num if self.experts.held is None else self.experts.held
        others = (num - self.experts.num_used) * held
        mixtures = self.num_layers - len(self.experts.dense_layers)
        hidden, size = self.hidden_size, self.experts.size
        biases = 2 * size + hidden if self.experts.has_bias else 0
        return self.num_parameters - mixtures * others * (3 * hidden * size + biases) // num


def mxfp4_experts(model: ModelConfig) -> StoredLevels:
    """Experts that a GPU holds as they are stored: 4 bits in steps of 128 inputs and panels of 64 outputs, and a scale
    of two bytes for 32 inputs. Of a rank that has no whole groups of inputs, the matrices behind the gate are
    expanded."""
    experts = model.experts
    if experts is None:
        return StoredLevels(has_table=False)
    hidden, size = model.hidden_size, experts.size
    count = len(model.layers) * (experts.num if experts.held is None else experts.held)
    shapes = ((2 * size, hidden), (hidden, size))
    kept = [shape for shape in shapes if shape[1] % MXFP4_GROUP == 0]
    numbers = sum(outputs * inputs for outputs, inputs in kept)
    held = sum(-(-outputs // 64) * 64 * (-(-inputs // 128) * 72) for outputs, inputs in kept)
    return StoredLevels(gpu_parameters=count * numbers, gpu_bytes=count * held, has_table=False)
