"""What an engine tells those that watch it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.decoding.group import Group
    from quire.engine.in_flight import InFlightStep
    from quire.types.output import TokensOut
    from quire.types.request import Abort
    from quire.types.step import StepResult


class EngineObserver:
    """Is told what an engine takes in and decides, in order, on the engine's thread. It changes nothing in it, and must
    neither raise nor wait. The methods here do nothing."""

    def submitting(self) -> None:
        """A request has come; it is accepted or refused next."""

    def refused(self) -> None:
        """The request was refused."""

    def submitted(self, group: Group) -> None:
        """A request was accepted."""

    def aborting(self, group: Group, abort: Abort) -> None:
        """A request, or a sample of it, is about to be ended."""

    def aborted(self, group: Group, abort: Abort) -> None:
        """That is done."""

    def cache_reset(self) -> None:
        """Cached prefixes were forgotten."""

    def unpinned(self, salt: str, name: str) -> None:
        """A pinned prompt was let go of."""

    def compiled(self, group: Group) -> None:
        """A request's grammar is compiled, or has failed; it waits to be admitted, or has ended."""

    def planned(self, step: InFlightStep) -> None:
        """A step was planned and is launched next."""

    def collected(self, step: InFlightStep, result: StepResult) -> None:
        """A step's result has come, and is taken in next."""

    def committed(self, step: InFlightStep, seconds: float) -> None:
        """A step's result was taken in. It took so long, beside the steps before it."""

    def stepped(self, out: TokensOut) -> None:
        """A call of `EngineCore.step` is over, with this to say."""

    def asked_for_slack(self) -> None:
        """`EngineCore.slack_seconds` was called."""

    def close(self) -> None:
        """The engine is closed."""
