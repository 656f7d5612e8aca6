"""Reads the sampling parameters that a model's authors recommend: from generation_config.json, from GGUF metadata, or,
for a packaged file without them, from the catalogue."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.runtime.loading.catalogue import CATALOGUE, PackagedModel
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.reader import GgufFile
from quire.runtime.loading.hf.config import GENERATION_CONFIG
from quire.runtime.loading.hf.json_file import read_json
from quire.types.errors import ConfigError, InvalidRequest, ModelLoadError
from quire.types.sampling_defaults import DEFAULT_NAMES, NO_DEFAULTS, SamplingDefaults

_HF_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_NONE = ("none", "vllm")  # vLLM's name for its own defaults
_FIX = 'correct it, or set generation_config to "none"'


def read_sampling_defaults(
    files: ModelFiles, source: str = "auto", override: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """Read the recommended sampling parameters of a model.

    `source` is "auto" (the model's own files), "none" (no recommendation counts) or a folder with another
    generation_config.json. `override` replaces single values. Raises ModelLoadError for an impossible value in a file,
    ConfigError for a wrong argument.
    """
    check_generation_config(source, override)
    if source in _NONE:
        defaults = NO_DEFAULTS
    elif source == "auto":
        defaults = _read_own(files)
    else:
        folder = Path(source).expanduser()
        path = folder / GENERATION_CONFIG if folder.is_dir() else folder
        defaults = _read_named(str(path), read_json(path), _HF_KEYS)
    return defaults.overridden(_renamed(override or {}))


def check_generation_config(source: object, override: object) -> None:
    """Raise ConfigError for arguments that are wrong with every model."""
    if not isinstance(source, str) or not source.strip():
        raise ConfigError("generation_config", f"must be text, got {source!r}", 'use "auto", "none" or a folder')
    if source not in ("auto", *_NONE) and not Path(source).expanduser().exists():
        raise ConfigError(
            "generation_config", f"there is nothing at {source!r}", 'use "auto", "none" or a folder with the file'
        )
    if override is None:
        return
    if not isinstance(override, Mapping):
        raise ConfigError("override_generation_config", f"must be an object, got {override!r}")
    known = (*DEFAULT_NAMES, "max_new_tokens")
    for name in override:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"known are: {', '.join(known)}"
            raise ConfigError(f"override_generation_config.{name}", "is no sampling default", fix)
    try:
        NO_DEFAULTS.overridden(_renamed(override))
    except InvalidRequest as error:
        raise ConfigError(f"override_generation_config.{error.field}", error.reason, error.fix) from None


def _renamed(override: Mapping[str, Any]) -> dict[str, Any]:
    return {_HF_KEYS.get(name, name): value for name, value in override.items()}


def _read_own(files: ModelFiles) -> SamplingDefaults:
    if files.kind == "hf":
        path = files.path / GENERATION_CONFIG
        return _read_named(str(path), read_json(path), _HF_KEYS) if path.is_file() else NO_DEFAULTS
    gguf = GgufFile(files.path)
    try:
        defaults = _read_named(gguf.name, gguf.metadata, _GGUF_KEYS)
    finally:
        gguf.close()
    return defaults if defaults != NO_DEFAULTS else _read_catalogue(files.path)


def _read_catalogue(path: Path) -> SamplingDefaults:
    """Return the catalogue's values for a packaged file, which is known by its name and size."""
    for entry in CATALOGUE.values():
        if isinstance(entry, PackagedModel) and path.name == entry.file and path.stat().st_size == entry.size:
            return entry.sampling
    return NO_DEFAULTS


def _read_named(file: str, values: Mapping[str, Any], keys: Mapping[str, str]) -> SamplingDefaults:
    found = {name: _plain(values[key]) for key, name in keys.items() if values.get(key) is not None}
    try:
        return SamplingDefaults(**found)
    except InvalidRequest as error:
        key = next(key for key, name in keys.items() if name == error.field)
        raise ModelLoadError(file, error.reason, tensor=key, fix=_FIX) from None


def _plain(value: Any) -> Any:
    """Return a 32-bit float of a GGUF file as the decimal that was meant: 0.6, not 0.6000000238418579."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
