"""Puts a loaded model to sleep, wakes it up, and replaces its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.device import torch_device
from quire.runtime.layers.builder import TORCH_DTYPES
from quire.runtime.layers.weights import WeightLayer
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.given import tensors_of
from quire.runtime.loading.new_weights import NewWeights, open_head, open_weights
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


@dataclass(slots=True)
class _Part:
    """A loaded model whose weights can be replaced: the one that answers, or the MTP head in its checkpoint."""

    model: BaseModel
    weights: WeightSet
    new: _Source | None = None  # checked, and not put into the model yet


class ModelStandby:
    """The weights and the KV cache of one worker, as far as they can be given back and replaced. The caller ensures
    that no step runs."""

    def __init__(self, files: ModelFiles, config: ModelConfig, engine: EngineConfig, *, is_random: bool) -> None:
        """`config`: of the model's stage. `is_random`: the weights are random, and not those of the files."""
        self._files, self._config, self._device = files, config, torch_device(engine.device.device)
        self._seed = engine.scheduler.seed if is_random else None
        self._has_graphs = self._device.type == "cuda" and not engine.device.enforce_eager
        self._memory = _make_memory(engine, self._device)
        self._main: _Part | None = None
        self._head: _Part | None = None
        self._has_drafts = False  # a model that drafts has files of its own
        self._is_reload = False  # the new weights are those of the model's own files
        self._head_follows = False  # the MTP head was replaced too, when the model was

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context in which the worker must be made."""
        return using_memory(self._memory)

    def loading(self, model: BaseModel, files: ModelFiles) -> AbstractContextManager[None]:
        """Return the context in which a model must be loaded. The first is the one that answers, any other drafts."""
        if self._main is None:
            self._main = _Part(model, WeightSet(model))
            return self._memory.holding("weights")
        if files.is_head:
            self._head = _Part(model, WeightSet(model))
        else:
            self._has_drafts = True
        return self._memory.holding("drafts")

    def sleep(self, level: int, tags: Sequence[Tag] = TAGS) -> None:
        """Give back the memory of weights and KV cache, or of one of them. Level 1 keeps the weights in host memory.
        Raises QuireError, and changes nothing."""
        assert self._main is not None
        self._wait()
        if "weights" in tags:
            self._memory.sleep("weights", keeps=level == 1, weights=self._main.weights.tensors())
        if "kv_cache" in tags:
            self._memory.sleep("kv_cache", keeps=False)

    def wake_up(self, tags: Sequence[Tag]) -> None:
        """Take memory again. Raises QuireError, and takes nothing, if there is not enough."""
        self._memory.wake_up(tags)

    def check_weights(self, update: WeightUpdate) -> bool:
        """Open new weights for `apply_weights`, and return whether they are all that the model has. Raises
        InvalidRequest if it cannot take them; nothing has changed then."""
        assert self._main is not None
        self.drop_weights()
        self._is_reload = update == WeightUpdate()
        try:
            self._open(update)
            for part in self._parts():
                if isinstance(part.new, NewWeights):
                    with threads_for(part.weights.num_values(part.new.names)):
                        part.new.check(part.weights, has_graphs=self._has_graphs)
        except BaseException as error:
            self.drop_weights()
            if isinstance(error, ModelLoadError):
                where = f"{error.tensor}: " if error.tensor else ""
                raise InvalidRequest("weights", f"{where}{error.reason}", error.fix) from None
            if isinstance(error, DoesNotMatch):
                fix = "give weights that are stored like those that the engine was started with"
                raise InvalidRequest("weights", str(error), fix) from None
            raise
        assert self._main.new is not None
        return self._main.new.is_all

    def _open(self, update: WeightUpdate) -> None:
        """Open the new weights of the model, and those of its MTP head if there are any."""
        main, head = self._main, self._head
        assert main is not None
        if update == WeightUpdate() and self._seed is not None:
            for part in self._parts():
                part.new = _RandomWeights(part.weights, self._seed, TORCH_DTYPES[self._config.dtype], self._device)
            return
        if update.tensors is not None:  # read once: they may be an iterator
            update = replace(update, tensors=tensors_of(update.tensors))
        main.new = new = open_weights(update, self._files, self._config, main.weights, main.model.elsewhere)
        if head is not None:
            head.new = open_head(update, self._files, self._config, head.weights, head.model.elsewhere)
        if new.is_empty and (head is None or head.new is None):
            raise InvalidRequest("weights", "have no tensor that this model reads", "give tensors of its checkpoint")

    def apply_weights(self) -> bool:
        """Put the weights of `check_weights` into the model. Returns whether those of a drafter are older now, so that
        its drafts are accepted less often. If this raises, the weights are of no use until all of them have been
        replaced."""
        main, head = self._main, self._head
        assert main is not None
        assert main.new is not None, "check_weights was not called"
        if head is not None and (main.new.is_all or head.new is not None):
            self._head_follows = head.new is not None
        try:
            for part in self._parts():
                if part.new is not None:
                    with threads_for(part.weights.num_values(part.new.names)):
                        part.weights.replace(part.new.fill, part.new.names)
                    part.model.blocks.forget_programs()
            self._wait()
        finally:
            self.drop_weights()
        return (self._has_drafts and not self._is_reload) or (head is not None and not self._head_follows)

    def drop_weights(self) -> None:
        """Forget the weights of `check_weights`. Idempotent."""
        for part in self._parts():
            if part.new is not None:
                part.new.close()
                part.new = None

    def close(self) -> None:
        """Let go of the model. Idempotent."""
        self.drop_weights()
        self._main = self._head = None
        self._memory.close()

    def _parts(self) -> list[_Part]:
        return [part for part in (self._main, self._head) if part is not None]

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
