"""Ranks that write their KV cache to a file at every check, and wait for the blocks of other engines however busy the
machine is. Tests start this program in place of quire.runtime.executor.rank_main."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.executor import rank_main
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.files import ModelFiles
from quire.runtime.tiers import remote_store

FOLDER = "QUIRE_TEST_CACHE_DUMPS"  # the environment variable that names the folder
_init, _check = SingleExecutor.__init__, SingleExecutor.check


def dump_path(folder: Path, role: str, rank: int) -> Path:
    return folder / f"{role}-{rank}.npy"


def init(
    self: SingleExecutor, files: ModelFiles, model: ModelConfig, config: EngineConfig, *arguments: Any, **options: Any
) -> None:
    assert config.cache.tiers.transport is not None
    self.role = config.cache.tiers.transport.role  # type: ignore[attr-defined]
    _init(self, files, model, config, *arguments, **options)


def check(self: SingleExecutor) -> None:
    _check(self)
    assert self._worker is not None
    path = dump_path(Path(os.environ[FOLDER]), self.role, self.ranks.place.rank)  # type: ignore[attr-defined]
    np.save(path, self._worker.cache.blocks.view(torch.uint8).numpy())


if __name__ == "__main__":
    SingleExecutor.__init__ = init  # type: ignore[method-assign]
    SingleExecutor.check = check  # type: ignore[method-assign]
    remote_store.CALL_SECONDS = remote_store.LOOKUP_SECONDS = 120.0
    rank_main.main(sys.argv[1:])
