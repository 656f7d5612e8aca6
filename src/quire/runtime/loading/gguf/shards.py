"""Reads a GGUF model that is split into several files as one."""

from __future__ import annotations

import re
from pathlib import Path

from quire.runtime.loading.gguf.reader import GgufFile
from quire.types.errors import ModelLoadError

MAX_SHARDS = 1_000
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE)


class GgufModel:
    """All files of a model: the metadata of the first, and the file of each tensor."""

    def __init__(self, path: Path) -> None:
        self.files: list[GgufFile] = []
        try:
            for number, part in enumerate(shard_paths(path)):
                self.files.append(GgufFile(part))
                _check_split(self.files[-1], number, self.files[0])
            self.owners = self._find_owners()
        except ModelLoadError:
            self.close()
            raise
        self.name, self.metadata = self.files[0].name, self.files[0].metadata

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _find_owners(self) -> dict[str, GgufFile]:
        owners: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in owners:
                    raise ModelLoadError(file.name, f"is also in {owners[name].name}", tensor=name)
                owners[name] = file
        total = self.files[0].metadata.get("split.tensors.count", len(owners))
        if total != len(owners):
            raise ModelLoadError(self.files[0].name, f"announces {total} tensors in all files, {len(owners)} are there")
        return owners


def first_shard(path: Path) -> Path:
    """Return the file that stands for the whole model: the path itself, or number 1 of a split set."""
    match = _SHARD.fullmatch(path.name)
    return path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf") if match else path


def shard_names(name: str) -> list[str]:
    """Return all file names of the set that `name` belongs to, or just `name` if it is not part of a set."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise ModelLoadError(name, f"its name announces {count} files, the limit is 1 to {MAX_SHARDS}")
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def shard_paths(path: Path) -> list[Path]:
    """Return the files of the model at `path`. Raises ModelLoadError if one is missing."""
    paths = [path.with_name(name) for name in shard_names(path.name)]
    for part in paths if len(paths) > 1 else ():
        if not part.is_file():
            raise ModelLoadError(str(part), f"is missing; the model has {len(paths)} files", fix="download all of them")
    return paths


def _check_split(file: GgufFile, number: int, first: GgufFile) -> None:
    if "split.count" not in first.metadata:
        if number > 0 or first.metadata.get("split.no"):
            raise ModelLoadError(first.name, "is missing, yet the name is that of a split file", tensor="split.count")
        return
    count = len(shard_paths(first.path))
    if file.metadata.get("split.count") != count:
        raise ModelLoadError(
            file.name,
            f"is {file.metadata.get('split.count')}, but {count} files belong to this name",
            tensor="split.count",
        )
    if file.metadata.get("split.no") != number:
        raise ModelLoadError(file.name, f"is {file.metadata.get('split.no')}, expected {number}", tensor="split.no")
