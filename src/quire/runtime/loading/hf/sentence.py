"""Reads the embedding settings from sentence-transformers' files, which are next to config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from quire.config.embedding import DENSE_ACTIVATIONS, Dense, EmbeddingSettings, Pooling
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
_DENSE_KEYS = {"in_features", "out_features", "bias", "activation_function"}


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
        by = _read_head_pooling(directory) if kind == "classifier" else Pooling("last")
        return EmbeddingSettings(by, max_length=length, lowercase=lowercase, classes=classes)
    dimensions = _read_dimensions(directory)
    if not (directory / MODULES).is_file():
        return EmbeddingSettings(usual, dimensions=dimensions)
    modules = read_modules(directory)
    _refuse_default_prompt(directory)
    first, second, *others = modules if len(modules) > 1 else (*modules, ("", ""))
    normalizes = bool(others) and others[-1][0] == "Normalize"
    dense = others[:-1] if normalizes else others
    known = {"Dense"} if kind not in DECODERS else set()
    if first[0] != "Transformer" or second[0] != "Pooling" or not {name for name, _ in dense} <= known:
        names = ", ".join(name for name, _ in modules)
        between = ", Dense if the model is an encoder," if kind in DECODERS else ", Dense"
        fix = f"supported: Transformer, Pooling{between} and, where they are normalized, Normalize"
        raise ModelLoadError(str(directory / MODULES), f"embeddings made by {names} are not supported", fix=fix)
    pooling = Pooling(_read_pooling(directory / second[1] / POOLING), normalize=normalizes)
    length, lowercase = _read_transformer(directory / first[1])
    layers = tuple(_read_dense(directory, folder) for _, folder in dense)
    return EmbeddingSettings(pooling, length, lowercase, dimensions=dimensions, dense=layers)


def _read_dense(directory: Path, folder: str) -> Dense:
    config = Fields(str(directory / folder / CONFIG), read_json(directory / folder / CONFIG))
    for key in config.values.keys() - _DENSE_KEYS:
        if config.raw(key) not in (None, False, "sentence_embedding"):
            raise config.refuse(key, "is not supported", fix=f"supported: {', '.join(sorted(_DENSE_KEYS))}")
    named = config.text("activation_function", "Tanh").rpartition(".")[2].lower()
    activation = next((known for known in DENSE_ACTIVATIONS if known == named), None)
    if activation is None:
        raise config.refuse(
            "activation_function", f"{named!r} is not supported", fix=f"supported: {', '.join(DENSE_ACTIVATIONS)}"
        )
    sizes = (config.integer("in_features", least=1), config.integer("out_features", least=1))
    return Dense(folder, *sizes, config.flag("bias", True), activation)


def _read_head_pooling(directory: Path) -> Pooling:
    """Return the pooling in front of a classifier's head: the first token, or the mean if config.json says so."""
    config = Fields(str(directory / CONFIG), read_json(directory / CONFIG))
    named = config.text("classifier_pooling", "cls")
    if named not in ("cls", "mean"):
        raise config.refuse("classifier_pooling", f"{named!r} is not supported", fix="supported: cls, mean")
    return Pooling("mean" if named == "mean" else "cls")


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
    if not isinstance(found, list) or not found or not all(isinstance(module, dict) for module in found):
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
