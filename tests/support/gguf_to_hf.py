"""The same model as a Hugging Face directory: `python tests/support/gguf_to_hf.py model.gguf directory`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.config.model import ModelConfig
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.reader import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def gguf_to_hf(
    source: Path, directory: Path, *, dtype: torch.dtype = torch.float32, tokenizer: Path | None = None
) -> Path:
    """Write config.json, generation_config.json and model.safetensors; with a tokenizer.json its files too."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(files_at(source))
    try:
        config = hf_config(checkpoint.config, dtype)
        tensors = {name: checkpoint.read(name).to(dtype).contiguous() for name in sorted(checkpoint.names)}
    finally:
        checkpoint.close()
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    (directory / "generation_config.json").write_text(json.dumps(special, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(source), indent=2))
    return directory


def tokenizer_config(source: Path) -> dict[str, object]:
    """What tokenizer.json does not say: the special tokens' roles and the chat template."""
    file = GgufFile(source)
    metadata = file.metadata
    file.close()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    result: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            result[f"{role}_token"] = tokens[int(str(token))]
    if "tokenizer.chat_template" in metadata:
        result["chat_template"] = metadata["tokenizer.chat_template"]
    return result


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    assert not config.rope.frequency_factors, "transformers has no spelling for explicit frequency factors"
    eos = list(config.eos_ids)
    result: dict[str, object] = {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads.num_query,
        "num_key_value_heads": config.heads.num_kv,
        "head_dim": config.heads.dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.rope.max_position,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.rope.kind != "default":
        result["rope_scaling"] = {"rope_type": config.rope.kind, **dict(config.rope.scaling)}
    if config.architecture == "llama":
        result |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if config.architecture == "mistral":
        result["sliding_window"] = None
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to copy")
    args = parser.parse_args()
    print(gguf_to_hf(args.source, args.directory, dtype=getattr(torch, args.dtype), tokenizer=args.tokenizer))


if __name__ == "__main__":
    main()
