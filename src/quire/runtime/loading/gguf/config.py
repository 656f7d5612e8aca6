"""Makes a ModelConfig from GGUF metadata and tensor names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from quire.config.fields import Fields
from quire.config.level_bytes import integer_bytes, packed_bytes, super_block_bytes, table_bytes
from quire.config.model import Dtype, Encoder, Heads, ModelConfig, Rope
from quire.config.weight_counts import StoredLevels
from quire.runtime.loading.checks import check_config, inside
from quire.runtime.loading.gguf.names import LONG_FACTORS, ONE_EXPERT, ROPE_FACTORS, SHORT_FACTORS
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.gguf.types import LEVEL_FORMS, NATIVE_GROUP, LevelForm
from quire.runtime.models.gguf_config import DRAFT_LAYERS, GATING, SIGMOID, decimal
from quire.runtime.models.registry import ENTRIES, GGUF_MIXTURES, GGUF_SIGMOIDS, IN_GGUF, Kind, find_family
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.models.family import GgufFamily

# Keys under the architecture's name that are read below. Others must be in _HARMLESS or the family's `settings`.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window", "attention.causal",
    "expert_count", "expert_used_count",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_WINDOW, _RMS_NORM, _LAYER_NORM = (
    f"attention.{each}" for each in ("sliding_window", "layer_norm_rms_epsilon", "layer_norm_epsilon")
)
_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
_TYPES = "token_types.weight"
_STACKED = (  # tensors that one layer stacks
    ("attn_q", "attn_k", "attn_v", "attn_q_a", "attn_kv_a_mqa"), ("attn_qkv", "attn_gate"), ("ffn_gate", "ffn_up"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)  # fmt: skip
_EXPANDED = ("attn_k_b", "attn_v_b", "attn_kv_b")  # matrices that no layer keeps quantized
_MOVED = {"qwen35": "ssm_out", "qwen35moe": "ssm_out"}  # their columns are reordered if value heads share keys
_POOLING = "pooling_type"
_POOLINGS: dict[int, Literal["mean", "cls", "last"] | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
_HARMLESS = {"tensor_data_layout", "rope.scaling.finetuned", _POOLING}


def gguf_model_config(model: GgufModel) -> ModelConfig:
    """Read and check the model's config. Raises ModelLoadError for missing, impossible or unsupported values."""
    from quire.runtime.models.build import count_weights

    name = gguf_architecture(model)
    family = gguf_family(name)
    prefix = Fields(model.name, model.metadata).text("general.architecture") + "."
    given = Fields(model.name, model.metadata, prefix=prefix)
    fields = given if family.whole is None else family.whole(given)
    _refuse_unknown(fields, prefix, family.settings, ENTRIES[name].kind)
    heads, tensors = _read_heads(fields), model.owners
    vocab_size = _read_vocab_size(model, fields)
    config = ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        heads=heads,
        rope=_read_rope(model, fields, heads, family),
        norm_eps=decimal(fields.number(_LAYER_NORM if fields.raw(_RMS_NORM) is None else _RMS_NORM)),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=any(f"blk.0.{each}.bias" in tensors for each in ("attn_q", "attn_qkv")),
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors if family.qk_norm is None else family.qk_norm,
        shared_norm=name == "falcon" and "blk.0.attn_norm_2.weight" not in tensors,
        keys_are_values=any(name.replace("attn_k", "attn_v") not in tensors for name in tensors if ".attn_k." in name),
        encoder=_read_encoder(model) if ENTRIES[name].kind == "encoder" else None,
        dtype=_read_dtype(model),
        bos_id=inside(_token_id(model, "bos"), vocab_size),
        eos_ids=_read_eos_ids(model, vocab_size),
        levels=StoredLevels() if family.transposed else _read_levels(model),
    )
    if family.read is not None:
        config = family.read(given, config)
    check_config(config, model.name)
    return count_weights(config)


def gguf_architecture(model: GgufModel) -> str:
    """Return the name of the model's family. Needs no torch. Raises ModelLoadError if it is not supported."""
    name = Fields(model.name, model.metadata).text("general.architecture")
    if name not in IN_GGUF:
        raise ModelLoadError(
            model.name, f"architecture {name!r} is not supported", fix=f"supported in GGUF: {', '.join(IN_GGUF)}"
        )
    fields = Fields(model.name, model.metadata, prefix=f"{name}.")
    if name in GGUF_SIGMOIDS and fields.integer(GATING, 0) == SIGMOID:
        return GGUF_SIGMOIDS[name]
    return GGUF_MIXTURES[name] if name in GGUF_MIXTURES and fields.integer("expert_count", 0) else IN_GGUF[name]


def gguf_family(architecture: str) -> GgufFamily:
    """Return the GGUF description of a family that supports GGUF."""
    family = find_family(architecture).gguf
    assert family is not None, architecture
    return family


def gguf_pooling(model: GgufModel) -> Literal["mean", "cls", "last"] | None:
    """Return the pooling that an embedding model's file stores, or None."""
    prefix = Fields(model.name, model.metadata).text("general.architecture") + "."
    fields = Fields(model.name, model.metadata, prefix=prefix)
    kind = fields.integer(_POOLING, 0)
    if kind not in _POOLINGS:
        raise fields.refuse(_POOLING, f"{kind} is not supported", fix="supported: 1 (mean), 2 (cls), 3 (last)")
    return _POOLINGS[kind]


def draft_blocks(model: GgufModel) -> tuple[str, ...]:
    """Return the name prefixes of the tensors of the last layers, which draft tokens and are ignored."""
    prefix = Fields(model.name, model.metadata).text("general.architecture") + "."
    fields = Fields(model.name, model.metadata, prefix=prefix)
    end, count = fields.integer("block_count"), fields.integer(DRAFT_LAYERS, 0)
    return tuple(f"blk.{layer}." for layer in range(max(0, end - count), end))


def _read_levels(model: GgufModel) -> StoredLevels:
    """Count the quantized weights that the layers will hold. Keys that are also values are stored once and held twice.
    A GPU dequantizes embedding tables and experts. Draft layers are not held."""
    drafts, moved = draft_blocks(model), _moved_columns(model)
    owners = {name: owner for name, owner in model.owners.items() if not name.startswith(drafts)}
    copied = [name for name in owners if ".attn_k." in name and name.replace("attn_k", "attn_v") not in owners]
    found, are_halves = StoredLevels(), _read_dtype(model) == "bfloat16"
    for name in (*owners, *copied):
        tensor, word = owners[name].tensors[name], name.removesuffix(".weight").rpartition(".")[2]
        if len(tensor.shape) < 2 or word in _EXPANDED:
            continue
        if tensor.ggml_type.name not in LEVEL_FORMS:
            if are_halves and tensor.ggml_type.name != "BF16":
                found = replace(found, expanded=found.expanded + math.prod(tensor.shape))
            continue
        size, own = math.prod(tensor.shape), LEVEL_FORMS[tensor.ggml_type.name]
        own = own._replace(super_bits=None) if word == moved else own  # reordering breaks up its super-blocks
        form = _held_form(_stacked_forms(model, name))
        on_gpu = name not in _TABLES and len(tensor.shape) == 2 and ONE_EXPERT.fullmatch(name) is None
        on_top, is_head = _cut_bytes(tensor.shape, own), name == _TABLES[0] and "output.weight" not in owners
        num_bytes = packed_bytes(size, nibbles=form.nibbles and form.group >= NATIVE_GROUP)
        counted = 0 if is_head else num_bytes
        found = replace(
            found,
            parameters=found.parameters + size,
            num_bytes=found.num_bytes + num_bytes,
            table_bytes=found.table_bytes + (_table_bytes(size, own) - counted if name in _TABLES else 0),
            integer_bytes=found.integer_bytes + _integer_bytes(tensor.shape, own),
            gpu_parameters=found.gpu_parameters + (size if on_gpu else 0),
            gpu_bytes=found.gpu_bytes + (_gpu_bytes(size, form) if on_gpu else 0),
            cut_heads_bytes=found.cut_heads_bytes + (on_top if ".attn_output." in name else 0),
            cut_sizes_bytes=found.cut_sizes_bytes + (on_top if ".ffn_down" in name else 0),
        )
    return found


def _moved_columns(model: GgufModel) -> str | None:
    name = Fields(model.name, model.metadata).text("general.architecture")
    fields = Fields(model.name, model.metadata, prefix=f"{name}.")
    shares = fields.raw("ssm.group_count") != fields.raw("ssm.time_step_rank")
    return _MOVED.get(name) if shares else None


def _stacked_forms(model: GgufModel, name: str) -> list[LevelForm]:
    """Return the forms of a tensor and of those that one layer stacks it with."""
    own = LEVEL_FORMS[model.owners[name].tensors[name].ggml_type.name]
    before, word = name.split(".")[:-2], name.split(".")[-2] if "." in name else ""
    words = next((stacked for stacked in _STACKED if word in stacked), ())
    names = [".".join((*before, other, "weight")) for other in words]
    kinds = [model.owners[each].tensors[each].ggml_type.name for each in names if each in model.owners]
    return [LEVEL_FORMS[kind] for kind in kinds if kind in LEVEL_FORMS] or [own]


def _held_form(forms: Sequence[LevelForm]) -> LevelForm:
    """Return the common form in which stacked tensors are held."""
    return LevelForm(
        all(form.nibbles for form in forms), min(form.group for form in forms), any(form.has_offset for form in forms)
    )


def _integer_bytes(shape: tuple[int, ...], form: LevelForm) -> int:
    """Return the bytes of a tensor for integer gemms, which hold each tensor in its own form, even when a layer stacks
    several."""
    size = math.prod(shape)
    if form.has_table:
        return table_bytes(size, size // shape[-1])
    if form.super_bits is not None:
        return super_block_bytes(size, form.super_bits, has_offsets=form.has_offset)
    least, most = (-8, 7) if form.nibbles and not form.has_offset else (form.least, form.most)
    return integer_bytes(size, least, most, has_offsets=form.has_offset, group=form.group)


def _table_bytes(size: int, form: LevelForm) -> int:
    """Return the bytes of an embedding table held in 8 bits, with a scale and an offset per 16 or 32 values."""
    return size + size // min(form.group, NATIVE_GROUP) * 4


def _cut_bytes(shape: tuple[int, ...], form: LevelForm) -> int:
    """Return the additional bytes of a tensor whose super-blocks are split between ranks."""
    if form.super_bits is None:
        return 0
    return _integer_bytes(shape, form._replace(super_bits=None)) - _integer_bytes(shape, form)


def _gpu_bytes(size: int, form: LevelForm) -> int:
    factors = size // form.group * (4 if form.has_offset else 2)
    is_half = form.nibbles and form.group >= NATIVE_GROUP
    return (size // 2 if is_half else size) + factors


def _refuse_unknown(fields: Fields, prefix: str, settings: frozenset[str], kind: Kind) -> None:
    for key in fields.values:
        if key.startswith(prefix) and key[len(prefix) :] not in _READ | _HARMLESS | settings:
            raise ModelLoadError(fields.file, "is not a known setting of this architecture", tensor=key)
    if fields.integer("expert_count", 0) > 0 and "expert_count" not in settings:
        raise fields.refuse("expert_count", "mixtures of experts are not supported")
    is_causal = fields.flag("attention.causal", kind != "encoder")
    if is_causal == (kind == "encoder"):
        reason = "tokens of an encoder see the whole text" if is_causal else "only causal models generate text"
        raise fields.refuse("attention.causal", reason)
    window = 0 if _WINDOW in settings else fields.integer(_WINDOW, 0)
    if 0 < window < fields.integer("context_length"):
        raise fields.refuse(_WINDOW, f"a window of {window} tokens is not supported")


def _read_heads(fields: Fields) -> Heads:
    num_query = fields.integer("attention.head_count")
    if num_query < 1:
        raise fields.refuse("attention.head_count", f"must be at least 1, is {num_query}")
    dim = fields.integer("attention.key_length", fields.integer("embedding_length") // num_query)
    if fields.integer("attention.value_length", dim) != dim:
        raise fields.refuse("attention.value_length", "keys and values of different sizes are not supported")
    return Heads(num_query, fields.integer("attention.head_count_kv", num_query), dim)


def _read_vocab_size(model: GgufModel, fields: Fields) -> int:
    embedding = model.owners.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(model.name, "is missing", tensor="token_embd.weight", fix="download the model again")
    size = embedding.tensors["token_embd.weight"].shape[0]
    if fields.integer("vocab_size", size) != size:
        raise fields.refuse("vocab_size", f"is {fields.integer('vocab_size')}, token_embd.weight has {size} rows")
    return size


def _read_encoder(model: GgufModel) -> Encoder:
    types = model.owners.get(_TYPES)
    return Encoder(num_types=0 if types is None else types.tensors[_TYPES].shape[0])


def _read_rope(model: GgufModel, fields: Fields, heads: Heads, family: GgufFamily) -> Rope:
    dim = fields.integer("rope.dimension_count", heads.dim)
    if dim == heads.dim:
        return _read_whole_rope(model, fields, dim)
    if family.has_pairs or not 0 < dim < heads.dim or dim % 2:
        raise fields.refuse("rope.dimension_count", f"only whole heads ({heads.dim}) can be rotated, not {dim}")
    return replace(_read_whole_rope(model, fields, dim), dim=dim)


def _read_whole_rope(model: GgufModel, fields: Fields, dim: int) -> Rope:
    theta, length = decimal(fields.number("rope.freq_base", 10_000.0)), fields.integer("context_length")
    if SHORT_FACTORS in model.owners or LONG_FACTORS in model.owners:
        return _read_long_rope(model, fields, theta, dim)
    factors = _read_frequency_factors(model, ROPE_FACTORS, dim)
    linear = fields.number("rope.scale_linear", 1.0)
    kind = fields.text("rope.scaling.type", "none" if linear == 1.0 else "linear")
    factor = fields.number("rope.scaling.factor", linear)
    if factor <= 0:
        raise fields.refuse("rope.scaling.factor", f"must be above 0, is {factor}")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return Rope(theta=theta, max_position=length, frequency_factors=factors)
    if factors:
        raise ModelLoadError(model.name, f"together with rope scaling {kind!r} is not supported", tensor=ROPE_FACTORS)
    if kind == "linear":
        return Rope(theta, "linear", (("factor", factor),), length)
    if kind == "yarn":
        return Rope(theta, "yarn", _read_yarn(fields, factor, length), length)
    raise fields.refuse("rope.scaling.type", f"{kind!r} is not supported", fix="supported: none, linear, yarn")


def _read_yarn(fields: Fields, factor: float, length: int) -> tuple[tuple[str, float], ...]:
    scaling = {
        "factor": factor,
        "original_max_position_embeddings": float(fields.integer("rope.scaling.original_context_length", length)),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        value = fields.optional_number(f"rope.scaling.{key}")
        if value is not None:
            scaling[name] = value
    extra = fields.number("rope.scaling.attn_factor", fields.number("rope.scaling.yarn_attn_factor", 1.0))
    if extra != 1.0:
        scaling["attention_factor"] = extra * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return tuple(scaling.items())


def _read_long_rope(model: GgufModel, fields: Fields, theta: float, dim: int) -> Rope:
    """Read the divisors for short and for long sequences. Files store no kind of scaling, only the attention factor."""
    length = fields.integer("context_length")
    for name in (SHORT_FACTORS, LONG_FACTORS):
        if name not in model.owners:
            raise ModelLoadError(model.name, "is missing", tensor=name, fix="download the model again")
    short, long = (_read_frequency_factors(model, name, dim) for name in (SHORT_FACTORS, LONG_FACTORS))
    scaling = {
        "original_max_position_embeddings": float(fields.integer("rope.scaling.original_context_length", length)),
        "attention_factor": decimal(fields.number("rope.scaling.attn_factor", 1.0)),
    }
    return Rope(theta, "longrope", tuple(scaling.items()), length, short, long)


def _read_frequency_factors(model: GgufModel, name: str, dim: int) -> tuple[float, ...]:
    """Read a tensor of divisors, one per frequency; Llama 3 files store their rope scaling this way. () if it is
    missing."""
    owner = model.owners.get(name)
    if owner is None:
        return ()
    tensor = owner.tensors[name]
    if tensor.ggml_type.name != "F32" or tensor.shape != (dim // 2,):
        found = f"{tensor.ggml_type.name} of shape {tensor.shape}"
        raise ModelLoadError(owner.name, f"is {found}, expected F32 of shape ({dim // 2},)", tensor=name)
    factors = memoryview(owner.raw(name).tobytes()).cast("f").tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelLoadError(owner.name, "must hold finite numbers above 0", tensor=name)
    return tuple(factors)


def _read_dtype(model: GgufModel) -> Dtype:
    kinds = {tensor.ggml_type.name for file in model.files for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _read_eos_ids(model: GgufModel, vocab_size: int) -> tuple[int, ...]:
    found = (inside(_token_id(model, role), vocab_size) for role in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _token_id(model: GgufModel, role: str) -> int | None:
    return Fields(model.name, model.metadata).optional_integer(f"tokenizer.ggml.{role}_token_id")
