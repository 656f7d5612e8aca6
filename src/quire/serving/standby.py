"""Methods of LLM and AsyncLLM that put the engine to sleep and replace its weights, with vLLM's names."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from quire.serving.client import run_command
from quire.serving.offline import OfflineModel
from quire.types.errors import InvalidRequest
from quire.types.standby import TAGS, Command, PauseMode, StandbyState, Tag, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class StandbyModel(OfflineModel):
    """The part of LLM that lets it sleep and replaces its weights. No request may be live."""

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the weights and the KV cache. Level 1 keeps the weights in host memory; level 2 drops
        them, so that they must be loaded again. A GPU needs `enable_sleep_mode`."""
        self._command(Command("sleep", mode="wait", level=level))

    def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take the memory again. `tags`: only "weights" or only "kv_cache"; None: both."""
        self._command(Command("wake_up", tags=read_tags(tags)))

    @property
    def is_sleeping(self) -> bool:
        """Whether memory was given back, and requests are refused."""
        return self._command(Command("state")).is_sleeping

    @property
    def weight_version(self) -> str:
        """The name of the weights: "default" for those of the model's files."""
        return self._command(Command("state")).weight_version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: str | None = None) -> None:
        """Replace weights by tensors with the names, shapes and dtypes of a Hugging Face checkpoint. All tensors that
        the model stores together must come in one call, for example q_proj, k_proj and v_proj of a layer. If one does
        not fit, nothing changes. Empties the prefix cache."""
        self._update(WeightUpdate(tensors=weights), version)

    def update_weights_from_disk(
        self, model_path: str | os.PathLike[str] | None = None, *, version: str | None = None
    ) -> None:
        """Replace all weights by those of another checkpoint of the same model; None: load the model's own files again.
        If it does not fit, nothing changes. Empties the prefix cache."""
        self._update(WeightUpdate(None if model_path is None else os.fspath(model_path)), version)

    def reload_weights(self) -> None:
        """Load the model's own files again, for example after `sleep(level=2)`."""
        self.update_weights_from_disk()

    def _update(self, update: WeightUpdate, version: str | None) -> None:
        self._command(Command("update_weights", mode="wait", update=update, version=version))

    def _command(self, command: Command) -> StandbyState:
        self._check_open()
        with self._alone():
            return run_command(self._client, command)


class AsyncStandby(ABC):
    """The part of AsyncLLM that pauses it, lets it sleep, and replaces its weights. `mode` says what happens to live
    requests: "abort" ends them, "wait" lets them finish, and with "keep" they continue afterwards. New ones wait."""

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop generating until `resume_generation`. `clear_cache`: empty the prefix cache, unless requests are
        kept."""
        await self._command(Command("pause", mode=mode, clears_cache=clear_cache))

    async def resume_generation(self) -> None:
        """Continue after `pause_generation`."""
        await self._command(Command("resume"))

    async def is_paused(self) -> bool:
        """Return whether generation is paused."""
        return (await self._command(Command("state"))).is_paused

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Give back the memory of the weights and the KV cache. Level 1 keeps the weights in host memory; level 2 drops
        them, so that they must be loaded again. While it sleeps, requests are refused. A GPU needs
        `enable_sleep_mode`."""
        await self._command(Command("sleep", mode=mode, level=level))

    async def wake_up(self, tags: Iterable[Tag] | None = None) -> None:
        """Take the memory again. `tags`: only "weights" or only "kv_cache"; None: both."""
        await self._command(Command("wake_up", tags=read_tags(tags)))

    async def is_sleeping(self) -> bool:
        """Return whether memory was given back."""
        return (await self._command(Command("state"))).is_sleeping

    async def weight_version(self) -> str:
        """Return the name of the weights: "default" for those of the model's files."""
        return (await self._command(Command("state"))).weight_version

    async def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, mode: PauseMode = "abort", version: str | None = None
    ) -> None:
        """Replace weights by tensors, like `LLM.load_weights`. Kept requests continue with the new weights, and compute
        what they have so far again."""
        await self._update(WeightUpdate(tensors=weights), mode, version)

    async def update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str] | None = None,
        *,
        mode: PauseMode = "abort",
        version: str | None = None,
    ) -> None:
        """Replace all weights by those of another checkpoint of the same model; None: load the model's own files
        again."""
        await self._update(WeightUpdate(None if model_path is None else os.fspath(model_path)), mode, version)

    async def reload_weights(self, *, mode: PauseMode = "abort") -> None:
        """Load the model's own files again, for example after `sleep(level=2)`."""
        await self.update_weights_from_disk(mode=mode)

    async def _update(self, update: WeightUpdate, mode: PauseMode, version: str | None) -> None:
        await self._command(Command("update_weights", mode=mode, update=update, version=version))

    @abstractmethod
    async def _command(self, command: Command) -> StandbyState:
        """Carry out a command. Raises its error."""


def read_tags(tags: Iterable[Tag] | None) -> tuple[Tag, ...]:
    """Return the tags of a wake-up; None: all. Raises InvalidRequest."""
    if tags is None:
        return TAGS
    if isinstance(tags, str | Mapping) or not isinstance(tags, Iterable):
        raise InvalidRequest("tags", f"cannot be {tags!r:.40}", 'give a list, such as ["weights"]')
    return tuple(tags)
