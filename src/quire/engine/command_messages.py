"""The messages by which an edge pauses the engine, lets it sleep and replaces its weights."""

from __future__ import annotations

import msgspec

from quire.types.errors import InvalidRequest, QuireError
from quire.types.standby import Action, Command, PauseMode, StandbyState, Tag, WeightUpdate, check_command


class RunCommand(msgspec.Struct, frozen=True, tag="command"):
    """Pause, resume, sleep, wake up or replace weights. The engine answers with a CommandAnswer of the same number when
    that is done."""

    number: int
    action: Action
    mode: PauseMode
    clears_cache: bool
    level: int
    tags: tuple[Tag, ...]
    path: str | None  # of new weights; None: the model's own files
    version: str | None
    requests: tuple[str, ...] | None = None

    def command(self) -> Command:
        update = WeightUpdate(self.path)
        return Command(
            self.action, self.mode, self.clears_cache, self.level, self.tags, update, self.version, self.requests
        )


def message_of(number: int, command: Command) -> RunCommand:
    """Return the message for a command. Raises InvalidRequest: an engine does not answer messages that it cannot
    decode."""
    one = check_command(command)
    return RunCommand(
        number, one.action, one.mode, one.clears_cache, one.level, one.tags, one.update.path, one.version, one.requests
    )


class CommandAnswer(msgspec.Struct, frozen=True, tag="commanded"):
    """The state after a command, or the parts of the error that refuses it; without a field it is no InvalidRequest."""

    number: int
    state: StandbyState | None
    field: str = ""
    reason: str = ""
    fix: str = ""

    def result(self) -> StandbyState | QuireError:
        if self.state is not None:
            return self.state
        return InvalidRequest(self.field, self.reason, self.fix) if self.field else QuireError(self.reason)


def answer_command(number: int, result: StandbyState | QuireError) -> CommandAnswer:
    """Return the answer to a command."""
    if isinstance(result, InvalidRequest):
        return CommandAnswer(number, None, result.field, result.reason, result.fix)
    return (
        CommandAnswer(number, None, "", str(result))
        if isinstance(result, QuireError)
        else CommandAnswer(number, result)
    )
