"""Settings of pooling models: how hidden states become one vector per text, and how an encoder runs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.engine import DeviceConfig
from quire.config.facts import HardwareFacts
from quire.config.lengths import model_length
from quire.config.memory import PROCESS_BYTES, widest_activations
from quire.config.model import DTYPE_BYTES, ModelConfig
from quire.config.parallel import NO_PARALLEL, ParallelConfig, check_devices, check_encoder
from quire.config.rank_model import check_shares, largest_rank
from quire.config.resolve import device_capacity, resolve_device
from quire.config.sizes import format_size, format_table
from quire.types.errors import ConfigError, DoesNotFit
from quire.types.pooling import PoolingKind

BATCHED_TOKENS = {"cpu": 4_096, "cuda": 32_768}
DEFAULT_NUM_TEXTS = 1_024
MASK_ELEMENTS = 1 << 26  # on a GPU: most elements of the masks of padded texts that add a bias to attention scores
TURNS = 8  # requests that share a batch if each has many texts
_SETTINGS = {  # settings that apply to an encoder; enforce_eager is always true
    "dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads", "seed",
    "gpu_memory_utilization", "enforce_eager", "task", "tensor_parallel_size", "pipeline_parallel_size", "executor",
    "rank_timeout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pooling:
    """How one vector is made of those of a text's tokens: their mean, the first token's (cls) or the last token's."""

    kind: PoolingKind = "mean"
    normalize: bool = True  # scale the vector to length 1


Activation = Literal["sigmoid", "softmax", "none"]
DenseActivation = Literal["identity", "tanh", "relu", "sigmoid", "gelu", "silu"]
DENSE_ACTIVATIONS: tuple[DenseActivation, ...] = ("identity", "tanh", "relu", "sigmoid", "gelu", "silu")
Task = Literal["auto", "generate", "embed", "classify", "score", "pooling"]
TASKS: tuple[Task, ...] = ("auto", "generate", "embed", "classify", "score", "pooling")


@dataclass(frozen=True, slots=True)
class Classes:
    """The labels of a classifier, and the activation applied to its logits."""

    labels: tuple[str, ...]
    activation: Activation


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after the pooling. Its weights are in a folder beside config.json."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: DenseActivation

    @property
    def parameters(self) -> int:
        return self.outputs * (self.inputs + self.has_bias)


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """What a model's files say about its embeddings or labels."""

    pooling: Pooling = Pooling()
    max_length: int | None = None  # in tokens; None: the number of positions
    lowercase: bool = False  # lowercase texts before they are tokenized
    classes: Classes | None = None  # None: the model makes embeddings
    dimensions: tuple[int, ...] | None = None  # allowed cut lengths of embeddings; (): any; None: no cut
    answers: tuple[int | str, int | str] | None = None  # tokens of "no" and "yes" for a decoder's scores
    dense: tuple[Dense, ...] = ()  # applied to the pooled vector, before it is normalized

    def embedding_size(self, model: ModelConfig) -> int:
        return self.dense[-1].outputs if self.dense else model.embedding_size


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """What the serving layer needs to know of a model that makes embeddings or classifies."""

    task: Literal["embed", "classify"]
    size: int  # elements of an embedding, or number of labels
    max_model_len: int
    vocab_size: int
    settings: EmbeddingSettings
    padding_id: int | None = None  # id of the padding token, which gets no position
    has_pairs: bool = True  # tokens of a pair's second text have another token type
    turn_tokens: int = 1  # tokens computed for one request before other requests get a batch
    by_decoder: bool = False  # texts run as prompts of an EngineCore, and the caller finishes the vectors


def describe_pooling(model: ModelConfig, settings: EmbeddingSettings, config: EncoderConfig) -> PoolingModel:
    own, classes = model.encoder, settings.classes
    offset, num_types = (0, 0) if own is None else (own.position_offset, own.num_types)
    return PoolingModel(
        task="embed" if classes is None else "classify",
        size=settings.embedding_size(model) if classes is None else len(classes.labels),
        max_model_len=config.max_model_len,
        vocab_size=model.vocab_size,
        settings=settings,
        padding_id=offset - 1 if offset else None,
        has_pairs=num_types > 1,
        turn_tokens=max(1, config.max_num_batched_tokens // TURNS),
    )


def describe_decoder_pooling(model: ModelConfig, settings: EmbeddingSettings, max_model_len: int) -> PoolingModel:
    """Return the PoolingModel of a decoder. Each text leaves room for one token, which is never sampled."""
    classes = settings.classes
    return PoolingModel(
        task="embed" if classes is None else "classify",
        size=model.embedding_size if classes is None else len(classes.labels),
        max_model_len=min(max_model_len - 1, settings.max_length or max_model_len),
        vocab_size=model.vocab_size,
        settings=settings,
        has_pairs=False,
        by_decoder=True,
    )


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The device of an encoder, and how much it computes at once."""

    device: DeviceConfig
    max_model_len: int  # tokens per text
    max_num_seqs: int  # texts per batch
    max_num_batched_tokens: int  # tokens per batch, with all texts padded to the longest
    seed: int = 0
    parallel: ParallelConfig = NO_PARALLEL  # the ranks that share its layers


@dataclass(frozen=True, slots=True)
class EncoderMemory:
    """Bytes that an encoder needs, by purpose. `str()` gives the table that `quire doctor` prints."""

    device: str
    capacity: int  # bytes that this process may use on the device
    process: int
    weights: int
    token_bytes: int  # peak activations of a layer, per token
    config: EncoderConfig
    bias: int = 0  # terms of attention scores by the distance of two tokens, and masks that add them

    @property
    def activations(self) -> int:
        return self.config.max_num_batched_tokens * self.token_bytes

    @property
    def total(self) -> int:
        return self.process + self.weights + self.activations + self.bias

    def check(self) -> None:
        """Raise DoesNotFit if it exceeds the capacity. The error names the setting to change."""
        if self.total <= self.capacity:
            return
        short = f"{format_size(self.total)} are needed, {format_size(self.capacity)} are available on {self.device}"
        room = (self.capacity - self.process - self.weights - self.bias) // self.token_bytes
        if room >= self.config.max_model_len:
            raise DoesNotFit("max_num_batched_tokens", short, f"lower it to {room} or less")
        weights = f"({format_size(self.weights)} of them weights)"
        raise DoesNotFit("model", f"{short} {weights}", "choose a smaller model or dtype")

    def __str__(self) -> str:
        config = self.config
        lines = [
            ("weights", self.weights, ""),
            ("activations", self.activations, "upper bound for one batch"),
            *([("attention bias", self.bias, "by the distance of two tokens")] if self.bias else []),
            ("process", self.process, "Python, torch, libraries"),
            ("total", self.total, f"of {format_size(self.capacity)} on {self.device}"),
        ]
        batch = (
            f"  a batch has up to {config.max_num_seqs:,} texts and {config.max_num_batched_tokens:,} tokens, "
            f"a text up to {config.max_model_len:,}"
        )
        return "\n".join(["memory plan", *format_table(lines), batch])


def resolve_encoder_config(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, settings: EmbeddingSettings
) -> EncoderConfig:
    """Make the configuration of an encoder and check it against the machine. Raises ConfigError or DoesNotFit.

    By default weights keep the dtype of the checkpoint, because embeddings are compared with those made elsewhere.
    """
    parallel = read_arguments(args).parallel
    check_encoder(parallel)
    _refuse_others(args)
    if args.dtype == "auto":
        args = replace(args, dtype=model.dtype)
    device = resolve_device(args, facts, model)
    check_devices(parallel, device.device, len(facts.cuda))
    check_shares(model, parallel, device.kv_dtype)
    kind, length = device.device.partition(":")[0], _text_length(args, model, settings)
    num_tokens = args.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = max(BATCHED_TOKENS[kind], length)
    elif num_tokens < length:
        fix = f"raise it to {length} or more, or lower max_model_len"
        raise ConfigError("max_num_batched_tokens", f"is {num_tokens}, and a text may have {length} tokens", fix)
    config = EncoderConfig(device, length, args.max_num_seqs or DEFAULT_NUM_TEXTS, num_tokens, args.seed, parallel)
    plan_encoder_memory(args, facts, model, config, settings).check()
    return config


def _refuse_others(args: EngineArguments) -> None:
    usual = EngineArguments()
    for name in (field.name for field in fields(args) if field.name not in _SETTINGS):
        if getattr(args, name) != getattr(usual, name):
            reason = "is for models that generate text, and this one is an encoder"
            raise ConfigError(name, reason, "leave it out")


def _text_length(args: EngineArguments, model: ModelConfig, settings: EmbeddingSettings) -> int:
    longest = model_length(model)
    if args.max_model_len is None:
        return min(longest, settings.max_length or longest)
    if args.max_model_len > longest:
        reason = f"is {args.max_model_len}, but the model knows {longest} positions"
        raise ConfigError("max_model_len", reason, f"set it to {longest} or less")
    return args.max_model_len


def plan_encoder_memory(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, config: EncoderConfig, settings: EmbeddingSettings
) -> EncoderMemory:
    """Compute the memory that an encoder needs, or the rank that needs most. Allocates nothing; `EncoderMemory.check`
    raises if it does not fit."""
    model = largest_rank(model, config.parallel)
    device, kind = config.device.device, config.device.device.partition(":")[0]
    has_units = facts.computes(config.device.dtype, device)
    value_bytes = DTYPE_BYTES[config.device.dtype if has_units else "float32"]
    dense = sum(layer.parameters for layer in settings.dense)
    return EncoderMemory(
        device=device,
        capacity=device_capacity(args, facts, device) // (config.parallel.num_ranks if kind == "cpu" else 1),
        process=PROCESS_BYTES[kind],
        weights=model.num_parameters * value_bytes + dense * DTYPE_BYTES["float32"],
        token_bytes=widest_activations(model) * max(value_bytes, DTYPE_BYTES["float32"]),
        config=config,
        bias=_bias_memory(model, config, kind) * value_bytes,
    )


def _bias_memory(model: ModelConfig, config: EncoderConfig, kind: str) -> int:
    """Return the elements of the terms that a model adds to attention scores by distance. On a GPU, texts are padded,
    and the masks of several texts hold these terms too."""
    if model.encoder is None or not model.encoder.has_distance_bias:
        return 0
    length, heads = config.max_model_len, model.heads.num_query
    terms = heads * length**2
    if kind == "cpu":
        return terms
    return terms + max(terms, min(MASK_ELEMENTS, config.max_num_batched_tokens * heads * length))
