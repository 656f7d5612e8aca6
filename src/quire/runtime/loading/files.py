"""Recognizes a model's files on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.runtime.loading.gguf.shards import first_shard
from quire.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: a GGUF file (the first of a split set), or a Hugging Face directory. `is_head`: what is
    meant is not the model, but the MTP head in its checkpoint."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]
    is_head: bool = False


def files_at(path: Path) -> ModelFiles:
    """Return the model at an existing path. Raises ConfigError if there is none, or more than one."""
    if path.is_dir():
        return _files_in(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        first = first_shard(path)
        return ModelFiles(first.stem, first, "gguf")
    if path.name == "config.json" or suffix == ".safetensors":
        return _files_in(path.absolute().parent)
    if suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ConfigError(
            "model", f"{path} is of a kind that can run code, and is never opened", "use safetensors or GGUF"
        )
    raise ConfigError("model", f"{path} is no model file", "give a .gguf file or a folder with config.json")


def _files_in(directory: Path) -> ModelFiles:
    if (directory / "config.json").is_file():
        return ModelFiles(directory.resolve().name, directory, "hf")
    found = sorted({first_shard(path) for path in directory.glob("*.gguf")})
    if len(found) == 1:
        return ModelFiles(found[0].stem, found[0], "gguf")
    if found:
        names = ", ".join(path.name for path in found[:5])
        raise ConfigError(
            "model", f"{directory} has {len(found)} GGUF models ({names})", "give the path of one of them"
        )
    if (directory / "adapter_config.json").is_file():
        fix = "serve the model that it was trained on, with --enable-lora and --lora-modules NAME=FOLDER"
        raise ConfigError("model", f"{directory} is a LoRA adapter, not a model", fix)
    if any(directory.glob("*.safetensors")):
        raise ConfigError("model", f"{directory} has weights but no config.json", "download all of the model's files")
    raise ConfigError("model", f"{directory} has neither config.json nor a .gguf file", "check the path")
