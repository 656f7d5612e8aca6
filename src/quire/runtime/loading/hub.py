"""Fetches models from the Hugging Face hub with huggingface_hub, if that is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from quire.runtime.loading.gguf.shards import shard_names
from quire.runtime.loading.progress import Progress
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.install import install_extra

WANTED = ("*.json", "*.safetensors", "*.jinja", "vocab.txt")  # never code, never pickles
UNWANTED = ("consolidated*", "original/*", "onnx/*", "*/*")  # duplicates of the weights in other formats

MODULES = "modules.json"  # of sentence encoders, whose modules have files in subfolders
MODULE_FILES = ("*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, with an optional revision and an optional GGUF file in it.

    Raises ConfigError for a path that leaves the repository.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        parts = [part for name in (self.repository, self.revision, self.file) if name for part in name.split("/")]
        if not all(parts) or ".." in parts:
            raise ConfigError(
                "model", f"{self} leads out of the repository", 'name a file inside it, without ".." and empty folders'
            )

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def fetch_from_hub(name: HubName, *, offline: bool, progress: Progress) -> Path:
    """Download what is not cached yet. Returns the directory, or the GGUF file that the name specifies.

    Raises ModelLoadError if huggingface_hub is not installed, the network is unavailable, or the files do not exist.
    """
    hub = _import_hub(name)
    progress(f"fetching {name}", 0, 1)
    common = {"revision": name.revision, "local_files_only": offline}
    ignored = list(UNWANTED) if name.file is None else None
    try:
        directory = hub.snapshot_download(
            name.repository, allow_patterns=_wanted(name.file), ignore_patterns=ignored, **common
        )
        if name.file is None and (Path(directory) / MODULES).is_file():
            directory = hub.snapshot_download(name.repository, allow_patterns=list(MODULE_FILES), **common)
    except Exception as error:  # noqa: BLE001  what a network library may raise has no common base
        raise _explain(name, error, offline) from None
    progress(f"fetching {name}", 1, 1)
    return _found(Path(directory), name)


def _import_hub(name: HubName) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelLoadError(
            str(name), "hub names need the package huggingface_hub", fix=f"{install_extra('hub')}, or give a path"
        ) from None
    return huggingface_hub  # type: ignore[no-any-return]


def _wanted(file: str | None) -> list[str]:
    if file is None:
        return list(WANTED)
    folder, _, base = file.rpartition("/")
    return [f"{folder}/{part}" if folder else part for part in shard_names(base)]


def _found(directory: Path, name: HubName) -> Path:
    if name.file is not None:
        path = directory / name.file
        if not path.is_file():
            raise ModelLoadError(str(name), "the repository has no such file", fix="check the file's name")
        return path
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            str(name), "the repository has no config.json", fix=f"name its GGUF file: {name.repository}:file.gguf"
        )
    return directory


def _explain(name: HubName, error: Exception, offline: bool) -> ModelLoadError:
    if offline:
        return ModelLoadError(
            str(name), "is not in the hub's cache and QUIRE_OFFLINE is set", fix="unset it or give a path"
        )
    kind = type(error).__name__
    fixes = {
        "GatedRepoError": "accept its terms on the hub, then set HF_TOKEN or run: hf auth login",
        "RepositoryNotFoundError": "check the name; a private one needs HF_TOKEN or: hf auth login",
        "RevisionNotFoundError": "check the revision",
        "HFValidationError": "give org/name",
    }
    first_line = next(iter(str(error).strip().splitlines()), "")[:200]
    return ModelLoadError(
        str(name),
        f"cannot be fetched from the hub ({kind}: {first_line})",
        fix=fixes.get(kind, "check the network, or give a path"),
    )
