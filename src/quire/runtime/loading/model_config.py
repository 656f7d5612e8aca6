"""Reads a model's config from GGUF or Hugging Face files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.config import gguf_architecture, gguf_model_config, gguf_pooling
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.hf.config import hf_family, hf_model_config
from quire.types.errors import ConfigError

Found = TypeVar("Found")


def read_family(files: ModelFiles) -> str:
    """Return the name of the model's family. Needs no torch. Raises ModelLoadError if it is not supported."""
    return hf_family(files.path) if files.kind == "hf" else _read_gguf(files, gguf_architecture)


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Read and check the model's config without reading weights. Raises ModelLoadError, or ConfigError for an MTP head
    that is not there."""
    if files.is_head:
        return _read_head(files)
    return hf_model_config(files.path) if files.kind == "hf" else _read_gguf(files, gguf_model_config)


def _read_head(files: ModelFiles) -> ModelConfig:
    if files.kind != "hf":
        reason = "drafts by the model's own MTP head, which is not read from GGUF files"
        raise ConfigError("speculative_config.method", reason, 'use safetensors, "ngram" or a draft model')
    return hf_model_config(files.path, is_head=True)


def read_gguf_pooling(files: ModelFiles) -> Literal["mean", "cls", "last"] | None:
    """Return the pooling that a GGUF file stores; None if it stores none, or the model is no GGUF file."""
    return None if files.kind == "hf" else _read_gguf(files, gguf_pooling)


def _read_gguf(files: ModelFiles, read: Callable[[GgufModel], Found]) -> Found:
    model = GgufModel(files.path)
    try:
        return read(model)
    finally:
        model.close()
