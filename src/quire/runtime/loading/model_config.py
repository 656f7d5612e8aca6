"""A model's numbers, from whatever kind of files it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.config import gguf_architecture, gguf_model_config, gguf_pooling
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.hf.config import hf_family, hf_model_config

Found = TypeVar("Found")


def read_family(files: ModelFiles) -> str:
    """The name of the model's family. Needs no torch. Raises ModelLoadError for one that is not supported."""
    return hf_family(files.path) if files.kind == "hf" else _read_gguf(files, gguf_architecture)


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Read and check the model's numbers; touches no weights. Raises ModelLoadError."""
    return hf_model_config(files.path) if files.kind == "hf" else _read_gguf(files, gguf_model_config)


def read_gguf_pooling(files: ModelFiles) -> Literal["mean", "cls", "last"] | None:
    """How a GGUF file of a model for embeddings says that texts become vectors; None: it says nothing of it, or is
    none."""
    return None if files.kind == "hf" else _read_gguf(files, gguf_pooling)


def _read_gguf(files: ModelFiles, read: Callable[[GgufModel], Found]) -> Found:
    model = GgufModel(files.path)
    try:
        return read(model)
    finally:
        model.close()
