"""The observer interface of the engine, which the recorder (recording/) implements. The engine works without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.decoding.group import Group
    from quire.engine.in_flight import InFlightStep
    from quire.types.adapters import AdapterInfo
    from quire.types.output import TokensOut
    from quire.types.request import Abort
    from quire.types.step import StepResult


class EngineObserver:
    """The engine calls these methods in the order of events, on its own thread. An observer must not change the engine,
    raise or wait. The methods of this class do nothing."""

    def submitting(self) -> None:
        """`submit` was called. `submitted` or `refused` follows."""

    def refused(self) -> None:
        """The submitted request was refused."""

    def submitted(self, group: Group) -> None:
        """The submitted request was accepted."""

    def aborting(self, group: Group, abort: Abort) -> None:
        """A request, or one of its samples, is about to be aborted."""

    def aborted(self, group: Group, abort: Abort) -> None:
        """A request, or one of its samples, was aborted."""

    def cache_reset(self) -> None:
        """The prefix cache was emptied."""

    def unpinned(self, salt: str, name: str) -> None:
        """A prompt was unpinned."""

    def adapter_loaded(self, info: AdapterInfo) -> None:
        """A LoRA adapter was loaded under a name, and replaced any other adapter of that name."""

    def adapter_unloaded(self, name: str) -> None:
        """The name of a LoRA adapter was removed."""

    def adapter_fetched(self, digest: str, *, was_read: bool) -> None:
        """The reading of a LoRA adapter that had left host memory has ended."""

    def compiled(self, group: Group) -> None:
        """The grammar of a request was compiled, and the request waits to be admitted; or compiling failed, and the
        request has ended."""

    def planned(self, step: InFlightStep) -> None:
        """A step was planned. It is launched next."""

    def collected(self, step: InFlightStep, result: StepResult) -> None:
        """The result of a step was collected. It is committed next."""

    def committed(self, step: InFlightStep, seconds: float) -> None:
        """The result of a step was committed. `seconds`: how long the step took, without waiting for earlier steps."""

    def stepped(self, out: TokensOut) -> None:
        """`EngineCore.step` returns `out`."""

    def asked_for_slack(self) -> None:
        """`EngineCore.slack_seconds` was called."""

    def close(self) -> None:
        """The engine was closed."""
