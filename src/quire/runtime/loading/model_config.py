"""A model's numbers, from whatever kind of files it has."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.config import gguf_architecture, gguf_model_config
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.hf.config import hf_family, hf_model_config


def read_family(files: ModelFiles) -> str:
    """The name of the model's family. Needs no torch. Raises ModelLoadError for one that is not supported."""
    if files.kind == "hf":
        return hf_family(files.path)
    model = GgufModel(files.path)
    try:
        return gguf_architecture(model)
    finally:
        model.close()


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Read and check the model's numbers; touches no weights. Raises ModelLoadError."""
    if files.kind == "hf":
        return hf_model_config(files.path)
    model = GgufModel(files.path)
    try:
        return gguf_model_config(model)
    finally:
        model.close()
