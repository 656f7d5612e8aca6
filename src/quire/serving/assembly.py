"""An engine put together from a model's files: the same for the offline API and for the engine process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.config.model import ModelConfig
from quire.config.resolve import EngineArguments, resolve_engine_config
from quire.engine.core import EngineCore
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.hardware import detect_hardware
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.loading.progress import Progress


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine of which everything is decided and nothing allocated."""

    files: ModelFiles
    model: ModelConfig
    config: EngineConfig
    memory: MemoryPlan

    def build(self, load_format: Literal["auto", "dummy"], progress: Progress) -> EngineCore:
        """Load the weights and make the engine; its `close` gives the memory back."""
        executor = SingleExecutor(self.files, self.model, self.config, load_format=load_format, progress=progress)
        try:
            return EngineCore(executor, self.config.cache, self.config.scheduler, self.model.vocab_size)
        except BaseException:
            executor.close()
            raise


def plan_engine(files: ModelFiles, arguments: EngineArguments) -> PlannedEngine:
    """Decide how a model runs on this machine. Raises ConfigError, DoesNotFit or ModelLoadError."""
    model = read_model_config(files)
    config, memory = resolve_engine_config(arguments, detect_hardware(), model)
    return PlannedEngine(files, model, config, memory)
