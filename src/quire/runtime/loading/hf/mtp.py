"""Finds the multi-token-prediction (MTP) head in a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.config.model import ModelConfig
from quire.runtime.loading.hf.directory import weight_files
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.models.registry import WITH_MTP
from quire.types.errors import ConfigError, ModelLoadError

_INDEXER = "self_attn.indexer."  # in the head's block


def hf_head_config(directory: Path, target: ModelConfig) -> ModelConfig:
    """Return the config of the head in the checkpoint of `target`, without numbers of weights. Raises ConfigError if
    there is none."""
    from quire.runtime.models.mtp import head_config

    found = head_config(target)
    assert found.mtp is not None
    if not _has_tensors(directory, found.mtp.prefix, unknown=True):
        reason = f"drafts by the model's own MTP head, and its files have no tensor {found.mtp.prefix}*"
        raise ConfigError("speculative_config.method", reason, 'use files with the head, "ngram" or a draft model')
    if found.indexer is not None and not _has_tensors(directory, f"{found.mtp.prefix}{_INDEXER}", unknown=True):
        return replace(found, indexer=None)  # it attends to all tokens
    return found


def has_head(directory: Path, target: ModelConfig) -> bool:
    """Whether the checkpoint of `target` has an MTP head that Quire can use. Reads only the files' headers."""
    if target.architecture not in WITH_MTP:
        return False
    from quire.runtime.models.mtp import head_config  # imports the families that have heads

    head = head_config(target).mtp
    return head is not None and _has_tensors(directory, head.prefix, unknown=False)


def _has_tensors(directory: Path, prefix: str, *, unknown: bool) -> bool:
    """Return whether a tensor's name begins with `prefix`, or `unknown` for files that cannot be read: reading the
    weights raises the error."""
    try:
        paths, index = weight_files(directory)
        if index is not None:
            return any(name.startswith(prefix) for name in index)
        files = [SafetensorsFile(path) for path in paths]
    except ModelLoadError:
        return unknown
    found = any(name.startswith(prefix) for file in files for name in file.tensors)
    for file in files:
        file.close()
    return found
