"""Puts a loaded model to sleep, wakes it up, and replaces its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from zlib import crc32

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import TORCH_DTYPES
from quire.runtime.layers.weights import WeightLayer
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.new_weights import open_weights
from quire.runtime.loading.replace import WeightSet
from quire.runtime.models.base import BaseModel
from quire.runtime.object_tensors import DoesNotMatch
from quire.runtime.standby.memory import FixedMemory, HostMemory, SleepMemory, using_memory
from quire.runtime.threads import threads_for
from quire.types.errors import ConfigError, InvalidRequest, ModelLoadError
from quire.types.standby import TAGS, Tag, WeightUpdate


class _Source(Protocol):
    """Weights that were checked and may replace those of the model."""

    names: frozenset[str]
    is_all: bool

    def fill(self, layer: WeightLayer, part: str, name: str) -> None: ...

    def close(self) -> None: ...


class ModelStandby:
    """The weights and the KV cache of one worker, as far as they can be given back and replaced. The caller ensures
    that no step runs."""

    def __init__(self, files: ModelFiles, config: ModelConfig, engine: EngineConfig, *, is_random: bool) -> None:
        """`config`: of the model's stage. `is_random`: the weights are random, and not those of the files."""
        self._files, self._config, self._device = files, config, torch.device(engine.device.device)
        self._seed = engine.scheduler.seed if is_random else None
        self._has_graphs = self._device.type == "cuda" and not engine.device.enforce_eager
        self._memory = _make_memory(engine, self._device)
        self._model: BaseModel | None = None
        self._weights: WeightSet | None = None
        self._new: _Source | None = None  # checked, and not put into the model yet

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context in which the worker must be made."""
        return using_memory(self._memory)

    def loading(self, model: BaseModel) -> AbstractContextManager[None]:
        """Return the context in which a model must be loaded. The first is the one that answers, any other drafts."""
        if self._model is not None:
            return self._memory.holding("drafts")
        self._model, self._weights = model, WeightSet(model)
        return self._memory.holding("weights")

    def sleep(self, level: int, tags: Sequence[Tag] = TAGS) -> None:
        """Give back the memory of weights and KV cache, or of one of them. Level 1 keeps the weights in host memory.
        Raises QuireError, and changes nothing."""
        assert self._weights is not None
        self._wait()
        if "weights" in tags:
            self._memory.sleep("weights", keeps=level == 1, weights=self._weights.tensors())
        if "kv_cache" in tags:
            self._memory.sleep("kv_cache", keeps=False)

    def wake_up(self, tags: Sequence[Tag]) -> None:
        """Take memory again. Raises QuireError, and takes nothing, if there is not enough."""
        self._memory.wake_up(tags)

    def check_weights(self, update: WeightUpdate) -> bool:
        """Open new weights for `apply_weights`, and return whether they are all that the model has. Raises
        InvalidRequest if it cannot take them; nothing has changed then."""
        assert self._weights is not None
        assert self._model is not None
        self.drop_weights()
        if update == WeightUpdate() and self._seed is not None:
            self._new = _RandomWeights(self._weights, self._seed, TORCH_DTYPES[self._config.dtype], self._device)
            return True
        try:
            new = open_weights(update, self._files, self._config, self._weights, self._model.elsewhere)
            self._new = new
            with threads_for(self._weights.num_values(new.names)):
                new.check(self._weights, has_graphs=self._has_graphs)
        except BaseException as error:
            self.drop_weights()
            if isinstance(error, ModelLoadError):
                where = f"{error.tensor}: " if error.tensor else ""
                raise InvalidRequest("weights", f"{where}{error.reason}", error.fix) from None
            if isinstance(error, DoesNotMatch):
                fix = "give weights that are stored like those that the engine was started with"
                raise InvalidRequest("weights", str(error), fix) from None
            raise
        return new.is_all

    def apply_weights(self) -> None:
        """Put the weights of `check_weights` into the model. If this raises, the weights are of no use until all of
        them have been replaced."""
        new = self._new
        assert new is not None, "check_weights was not called"
        assert self._weights is not None
        assert self._model is not None
        try:
            with threads_for(self._weights.num_values(new.names)):
                self._weights.replace(new.fill, new.names)
            self._model.blocks.forget_programs()
            self._wait()
        finally:
            self.drop_weights()

    def drop_weights(self) -> None:
        """Forget the weights of `check_weights`. Idempotent."""
        if self._new is not None:
            self._new.close()
            self._new = None

    def close(self) -> None:
        """Let go of the model. Idempotent."""
        self.drop_weights()
        self._model = self._weights = None
        self._memory.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _RandomWeights:
    """The random weights that the model was started with."""

    is_all = True

    def __init__(self, weights: WeightSet, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.names = frozenset(weights.shapes())
        self._seed, self._dtype, self._generator = seed, dtype, torch.Generator(device)

    def fill(self, layer: WeightLayer, part: str, name: str) -> None:
        generator = self._generator.manual_seed(crc32(f"{self._seed} {name}".encode()))
        layer.randomize(part, generator, self._dtype)

    def close(self) -> None:
        """Do nothing."""


def _make_memory(engine: EngineConfig, device: torch.device) -> SleepMemory:
    if device.type == "cpu":
        return HostMemory()
    if not engine.device.sleep:
        return FixedMemory()
    if engine.cache.layout == "virtual":
        reason = 'cannot give back a cache of kv_layout "virtual" on a GPU'
        raise ConfigError("enable_sleep_mode", reason, 'use kv_layout="paged"')
    from quire.runtime.standby.cuda_memory import make_cuda_memory

    return make_cuda_memory(device)
