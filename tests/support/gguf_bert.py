"""Writes GGUF files of encoders from folders that transformers saved, in the layout that llama.cpp's converter gives
them: the settings, tokens and tensors of its files of the same folders were compared with these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
from safetensors.torch import load_file

from gguf_files import Stored, stored, write_gguf

LEFT_OUT = ("pooler.", "embeddings.position_ids")
KEYS = {  # of config.json, and of DistilBERT's
    "block_count": ("num_hidden_layers", "n_layers"), "context_length": ("max_position_embeddings",) * 2,
    "embedding_length": ("hidden_size", "dim"), "feed_forward_length": ("intermediate_size", "hidden_dim"),
    "attention.head_count": ("num_attention_heads", "n_heads"),
}  # fmt: skip
CONTROL, NORMAL = 3, 1


def export_encoder(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    settings: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write the folder's model as a GGUF file. `kind`: of matrices in layers, and of the table of tokens. `settings`:
    other ones, or more."""
    config = json.loads((folder / "config.json").read_text())
    skipped = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    found: dict[str, object] = {
        key: next(config[name] for name in names if name in config) for key, names in KEYS.items()
    }
    found |= {
        "context_length": config["max_position_embeddings"] - skipped,
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", 1e-12), "attention.causal": False,
    }  # fmt: skip
    given = {f"bert.{key}": value for key, value in (found | dict(settings or {})).items()}
    tensors = _tensors(folder, kind, skipped)
    return write_gguf(path, {"general.architecture": "bert", **given, **(metadata or {})}, tensors)


def _tensors(folder: Path, kind: str, skipped: int) -> list[Stored]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 8)
    made = []
    for name, values in load_file(folder / "model.safetensors").items():
        if name.startswith(LEFT_OUT):
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        values = values[skipped:] if ours == "position_embd.weight" else values
        is_plain = values.ndim < 2 or ours in ("position_embd.weight", "token_types.weight")
        made.append(stored(ours, values.contiguous().numpy(), "F32" if is_plain else kind))
    return made


def word_metadata(tokens: Sequence[str], *, lowercase: bool = True) -> dict[str, object]:
    """The tokenizer of a vocab.txt: the beginnings of words are marked, and what goes on with them is not."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    marked = [
        token if token in special else token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"
        for token in tokens
    ]
    ids = {"bos": "[CLS]", "eos": "[SEP]", "unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]"}
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "jina-v2-en", "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.token_type_count": 2, "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_sep_token": False,
        **{f"tokenizer.ggml.{key}_token_id": list(tokens).index(token) for key, token in ids.items()},
    }  # fmt: skip
