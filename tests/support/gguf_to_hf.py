"""The same model as a Hugging Face directory: `python tests/support/gguf_to_hf.py model.gguf directory`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.cpu.export import hugging_face_config
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.cursor import Texts
from quire.runtime.loading.gguf.reader import GgufFile


def gguf_to_hf(
    source: Path, directory: Path, *, dtype: torch.dtype = torch.float32, tokenizer: Path | None = None
) -> Path:
    """Write config.json, generation_config.json and model.safetensors; with a tokenizer.json its files too."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(files_at(source))
    try:
        config = hugging_face_config(checkpoint.config, str(dtype).removeprefix("torch."))
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
    assert isinstance(tokens, Texts)
    result: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            result[f"{role}_token"] = tokens[int(str(token))]
    if "tokenizer.chat_template" in metadata:
        result["chat_template"] = metadata["tokenizer.chat_template"]
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
