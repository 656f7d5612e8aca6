"""Finds the safetensors files of a directory."""

from __future__ import annotations

import re
from pathlib import Path

from quire.runtime.loading.hf.json_file import read_json
from quire.types.errors import ModelLoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".*-\d{5}-of-(?!00001)\d{5}\.safetensors")  # one file of several
CODE_CARRIERS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the files to open, and the index's map from tensor to file name, or None if there is no index."""
    index = directory / INDEX
    if index.is_file():
        return _indexed_files(directory, index)
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], None
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1 and _SHARD.fullmatch(found[0].name) is None:
        return found, None
    if found:
        raise ModelLoadError(
            str(directory), f"has {_count(found)} and no {INDEX}", fix="download all of the model's files"
        )
    carriers = sorted(path.name for pattern in CODE_CARRIERS for path in directory.glob(pattern))
    if carriers:
        raise ModelLoadError(
            str(directory),
            f"has its weights in {carriers[0]}, a format that can run code, and is never opened",
            fix="use a safetensors version of the model (transformers: save_pretrained writes one)",
        )
    raise ModelLoadError(str(directory), "has no safetensors files", fix="download the model's weights")


def _count(files: list[Path]) -> str:
    if len(files) == 1:
        return f"one part of a split checkpoint ({files[0].name})"
    return f"{len(files)} safetensors files"


def _indexed_files(directory: Path, index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(str(index), "must map tensor names to files", tensor="weight_map")
    for tensor, name in weight_map.items():
        if not tensor.isprintable():
            raise ModelLoadError(str(index), f"{tensor[:80]!r} is no name of a tensor", tensor="weight_map")
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(
                str(index), f"names {name!r}, which is not a safetensors file beside it", tensor=tensor
            )
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(str(file), f"is missing; {INDEX} names it", fix="download all of the model's files")
    return files, weight_map
