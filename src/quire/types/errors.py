"""The errors that users can get. Each message is one line: the problem, the limit and the fix."""

from __future__ import annotations


class QuireError(Exception):
    """Base class of all errors of Quire. The message is one line that can be shown to a user."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error by its fields, because the constructors of subclasses do not take the message. Errors cross
        processes, for example in multiprocessing pools."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[QuireError], args: tuple[object, ...], fields: dict[str, object]) -> QuireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class InvalidRequest(QuireError, ValueError):
    """A request was refused before any work was done for it. The message names the field, the limit and the fix."""

    def __init__(self, field: str, reason: str, fix: str = "") -> None:
        super().__init__(f"{field}: {reason}" + (f"; {fix}" if fix else ""))
        self.field, self.reason, self.fix = field, reason, fix


class UnknownParameter(InvalidRequest):
    """A request has a parameter, or a parameter has a member, that Quire does not know."""


class ConfigError(QuireError, ValueError):
    """A setting of the engine is invalid, by itself or in combination with others."""

    def __init__(self, setting: str, reason: str, fix: str = "") -> None:
        super().__init__(f"{setting}: {reason}" + (f"; {fix}" if fix else ""))
        self.setting, self.reason, self.fix = setting, reason, fix


class DoesNotFit(ConfigError):
    """The memory plan exceeds the memory of the machine. Raised before anything is allocated."""


class ModelLoadError(QuireError):
    """A model file was refused. The message names the file, the tensor or key (if one is at fault) and the reason."""

    def __init__(self, file: str, reason: str, *, tensor: str | None = None, fix: str = "") -> None:
        where = f"{file}: {tensor}" if tensor else file
        super().__init__(f"{where}: {reason}" + (f"; {fix}" if fix else ""))
        self.file, self.tensor, self.reason, self.fix = file, tensor, reason, fix


class EngineDead(QuireError):
    """The executor failed. All live requests have ended with an error."""


class OutOfBlocks(QuireError):
    """An allocation needs more free blocks than there are. Nothing was changed."""
