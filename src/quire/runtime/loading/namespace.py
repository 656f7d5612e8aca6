"""A digest of everything besides tokens that keys and values depend on, so that no two models share a cached block."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.shards import shard_paths
from quire.runtime.loading.hf.directory import weight_files
from quire.types.errors import ModelLoadError

FORMAT = 4  # incremented when the same fields mean other bytes in a block
_HEAD, _SAMPLE, _NUM_SAMPLES = 1 << 18, 1 << 12, 256  # bytes read of a file: its head, and samples spread over it


def cache_namespace(
    files: ModelFiles, model: ModelConfig, config: EngineConfig, load_format: Literal["auto", "dummy"] = "auto"
) -> str:
    """Return a hex digest of the weights, the model's config, dtypes, quantization, attention backend and block size.

    Of a large file it hashes size, modification time, head (tensor names and shapes) and samples from start to end. The
    time is left out if other engines share the blocks.
    """
    device, kind = config.device, config.device.device.partition(":")[0]
    digest = blake2b(digest_size=32, person=b"quire namespace")
    settings = (
        FORMAT,
        sys.byteorder,
        kind,
        device.dtype,
        device.kv_dtype,
        device.quantization,
        device.attention_backend,
    )
    for value in (settings, config.cache.block_size, config.cache.layout, model):
        digest.update(_framed(value))
    if config.cache.groups.window is not None:  # window blocks hold the layers with a window
        digest.update(_framed(("windows", config.cache.groups.num_window_blocks)))
    if config.parallel.num_ranks > 1:  # each rank stores its part of a block
        digest.update(_framed(("ranks", config.parallel.tensor, config.parallel.pipeline)))
    if load_format == "dummy":
        digest.update(_framed(("random", config.scheduler.seed)))
        return digest.hexdigest()
    dated = config.cache.tiers.transport is None  # copies of a model on two machines have different times
    for path in _weight_paths(files):
        digest.update(_framed((path.name, _sampled(path, dated=dated))))
    return digest.hexdigest()


def _weight_paths(files: ModelFiles) -> list[Path]:
    if files.kind == "gguf":
        return shard_paths(files.path)
    paths, _ = weight_files(files.path)
    return sorted(paths)


def _sampled(path: Path, *, dated: bool) -> bytes:
    """Return a digest of a file's size, its modification time if `dated`, and samples of it; a small file is hashed
    completely."""
    digest = blake2b(digest_size=32)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            digest.update(_framed((size, status.st_mtime_ns) if dated else (size,)))
            digest.update(file.read(_HEAD + _NUM_SAMPLES * _SAMPLE))
            for place in range(1, _NUM_SAMPLES + 1):
                file.seek(max(size * place // _NUM_SAMPLES - _SAMPLE, 0))
                digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise ModelLoadError(str(path), f"cannot be read: {error.strerror}") from None
    return digest.digest()


def _framed(value: object) -> bytes:
    """Encode a value with its type and length, recursively and in order, so that different values have different
    encodings."""
    if isinstance(value, bytes):
        kind, data = "bytes", value
    elif isinstance(value, tuple):
        kind, data = "tuple", b"".join(map(_framed, value))
    elif is_dataclass(value) and not isinstance(value, type):
        members = tuple((item.name, getattr(value, item.name)) for item in fields(value))
        kind, data = type(value).__name__, _framed(members)
    elif value is None or isinstance(value, bool | int | float | str):
        kind, data = type(value).__name__, repr(value).encode("utf-8", "surrogatepass")
    else:
        raise TypeError(f"a {type(value).__name__} has no place in a namespace")
    name = kind.encode()
    return len(name).to_bytes(8, "big") + name + len(data).to_bytes(8, "big") + data
