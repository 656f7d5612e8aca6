"""Every error a user can meet. One line each: what was wrong, the limit, and the fix."""

from __future__ import annotations


class QuireError(Exception):
    """Base of all errors raised on purpose; its text is one line fit to show a user."""


class InvalidRequest(QuireError, ValueError):
    """A request was refused before any work was done for it. Names the field, the limit and the fix."""

    def __init__(self, field: str, reason: str, fix: str = "") -> None:
        super().__init__(f"{field}: {reason}" + (f"; {fix}" if fix else ""))
        self.field, self.reason, self.fix = field, reason, fix


class ConfigError(QuireError, ValueError):
    """An engine setting is impossible, alone or together with the others."""

    def __init__(self, setting: str, reason: str, fix: str = "") -> None:
        super().__init__(f"{setting}: {reason}" + (f"; {fix}" if fix else ""))
        self.setting, self.reason, self.fix = setting, reason, fix


class DoesNotFit(ConfigError):
    """The memory plan exceeds what the machine has. Raised before anything is allocated."""


class ModelLoadError(QuireError):
    """A model file was refused. Names the file, the tensor or key when one is at fault, and the reason."""

    def __init__(self, file: str, reason: str, *, tensor: str | None = None, fix: str = "") -> None:
        where = f"{file}: {tensor}" if tensor else file
        super().__init__(f"{where}: {reason}" + (f"; {fix}" if fix else ""))
        self.file, self.tensor, self.reason, self.fix = file, tensor, reason, fix


class EngineDead(QuireError):
    """The executor failed as a whole; every live request was ended with an error."""


class OutOfBlocks(QuireError):
    """The pool cannot serve an allocation. Nothing was changed."""
