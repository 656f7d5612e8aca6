"""Reads the embedding settings from sentence-transformers' files, which are next to config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from quire.config.embedding import EmbeddingSettings, Pooling
from quire.config.fields import Fields
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.config import CONFIG
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.loading.model_config import read_family, read_gguf_pooling
from quire.runtime.models.labels import read_classes
from quire.runtime.models.registry import CLASSIFIERS, DECODERS, ENTRIES
from quire.types.errors import ModelLoadError

MODULES, POOLING, GENERAL = "modules.json", "config.json", "config_sentence_transformers.json"
_KINDS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"}
_PREFIX = "pooling_mode_"


def read_embedding_settings(files: ModelFiles) -> EmbeddingSettings:
    """Read the embedding settings of a model's folder, or the pooling of a GGUF file. Without such files: mean pooling,
    normalized; for decoders, the last token, normalized. A classifier has labels in place of an
    embedding.

    Raises ModelLoadError for an unsupported setting that would change the embeddings.
    """
    directory, kind = files.path, ENTRIES[read_family(files)].kind
    usual = Pooling("last" if kind in DECODERS else "mean")
    if files.kind != "hf":
        named = read_gguf_pooling(files)
        return EmbeddingSettings(usual if named is None else Pooling(named))
    if kind in CLASSIFIERS:
        length, lowercase = _read_transformer(directory)
        classes = read_classes(Fields(str(directory / CONFIG), read_json(directory / CONFIG)))
        by = Pooling("cls" if kind == "classifier" else "last")
        return EmbeddingSettings(by, max_length=length, lowercase=lowercase, classes=classes)
    dimensions = _read_dimensions(directory)
    if not (directory / MODULES).is_file():
        return EmbeddingSettings(usual, dimensions=dimensions)
    modules = read_modules(directory)
    _refuse_default_prompt(directory)
    first, second, *others = modules if len(modules) > 1 else (*modules, ("", ""))
    if first[0] != "Transformer" or second[0] != "Pooling" or [kind for kind, _ in others] not in ([], ["Normalize"]):
        names = ", ".join(kind for kind, _ in modules)
        fix = "supported: Transformer, Pooling and, where they are normalized, Normalize"
        raise ModelLoadError(str(directory / MODULES), f"embeddings made by {names} are not supported", fix=fix)
    pooling = _read_pooling(directory / second[1] / POOLING)
    length, lowercase = _read_transformer(directory / first[1])
    return EmbeddingSettings(Pooling(pooling, normalize=bool(others)), length, lowercase, dimensions=dimensions)


def _read_dimensions(directory: Path) -> tuple[int, ...] | None:
    """Return the lengths to which a matryoshka model's embeddings may be cut, from the keys of config.json that vLLM
    reads. Empty: any length; None: no matryoshka model."""
    config = Fields(str(directory / CONFIG), read_json(directory / CONFIG))
    found = config.raw("matryoshka_dimensions")
    if found is None:
        return () if config.flag("is_matryoshka", False) else None
    if not isinstance(found, list) or not all(type(size) is int and size > 0 for size in found):
        raise config.refuse("matryoshka_dimensions", "must be a list of whole numbers above 0")
    return tuple(found)


def read_modules(directory: Path) -> list[tuple[str, str]]:
    """Return the type and the folder of each module, in order."""
    path = directory / MODULES
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(str(path), f"cannot be read: {error}", fix="fetch the file again") from None
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise ModelLoadError(str(path), "must hold a list of modules", fix="fetch the file again")
    return [_read_module(Fields(str(path), module)) for module in found]


def _read_module(module: Fields) -> tuple[str, str]:
    folder = module.text("path", "")
    if folder not in ("", Path(folder).name) or folder == "..":
        raise module.refuse("path", f"must be a folder beside it, is {folder!r:.80}")
    return module.text("type").rpartition(".")[2], folder


def _read_pooling(path: Path) -> Literal["mean", "cls", "last"]:
    config = Fields(str(path), read_json(path))
    if not config.flag("include_prompt", True):
        raise config.refuse("include_prompt", "only true is supported")
    named = config.raw("pooling_mode")
    modes = [key.removeprefix(_PREFIX) for key in config.values if key.startswith(_PREFIX) and config.flag(key)]
    chosen = [named] if isinstance(named, str) else modes
    if len(chosen) != 1 or chosen[0] not in _KINDS:
        what = ", ".join(map(str, chosen)) or "none"
        raise config.refuse(
            _PREFIX.rstrip("_"), f"{what} is not supported", fix="supported: mean, cls or lasttoken alone"
        )
    return cast('Literal["mean", "cls", "last"]', _KINDS[chosen[0]])


def _read_transformer(directory: Path) -> tuple[int | None, bool]:
    """Return the maximum tokens of a text, and whether texts are lowercased."""
    files = sorted(directory.glob("sentence_*_config.json"))
    config = Fields(str(files[0]), read_json(files[0])) if files else Fields("", {})
    length = config.optional_integer("max_seq_length")
    if length is not None and length < 1:
        raise config.refuse("max_seq_length", f"must be at least 1, is {length}")
    return length, config.flag("do_lower_case", False)


def _refuse_default_prompt(directory: Path) -> None:
    path = directory / GENERAL
    values: Mapping[str, object] = read_json(path) if path.is_file() else {}
    config = Fields(str(path), values)
    if config.raw("default_prompt_name") is not None:
        raise config.refuse("default_prompt_name", "is not supported", fix="put the prompt before texts, and remove it")
