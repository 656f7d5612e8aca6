"""Which tensors a model of given sizes has, and their shapes, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.config.model import ModelConfig
from quire.types.errors import ModelLoadError

Shape = tuple[int, ...]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    block = _block_shapes(config)
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{part}": shape for part, shape in block.items()})
    return shapes


def check_tensors(
    config: ModelConfig,
    names: Iterable[str],
    *,
    shape: Callable[[str], Shape],
    source: Callable[[str], str],
    file: str,
) -> None:
    """Refuse a checkpoint with a tensor missing, of a wrong shape, or that the model has no place for.

    Done before anything is allocated by the config's numbers.
    """
    expected, present = expected_shapes(config), {name for name in names if ".rotary_emb." not in name}
    if config.tie_word_embeddings and HEAD in present:
        expected[HEAD] = expected[EMBEDDING]  # a second copy, which old exporters wrote down
    for name, wanted in expected.items():
        if name not in present:
            raise ModelLoadError(file, "is missing from the checkpoint", tensor=name, fix="download the model again")
        if shape(name) != wanted:
            raise ModelLoadError(source(name), f"has shape {shape(name)}, the config says {wanted}", tensor=name)
    for name in sorted(present - expected.keys()):
        raise ModelLoadError(source(name), f"has no place in a {config.architecture} model of this config", tensor=name)


def _block_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
    query, kv = heads.query_size, heads.kv_size
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (heads.dim,), "self_attn.k_norm.weight": (heads.dim,)}
    if config.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    return shapes
