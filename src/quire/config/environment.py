"""All environment variables that Quire reads. A bad value raises ConfigError."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from quire.types.errors import ConfigError

CACHE, OFFLINE, API_KEY, ADMIN_KEY = "QUIRE_CACHE", "QUIRE_OFFLINE", "QUIRE_API_KEY", "QUIRE_ADMIN_KEY"
CPU_PATH, CPU_PIN = "QUIRE_CPU_PATH", "QUIRE_CPU_PIN"
ROW_PROGRAM, CODED_EXPERTS = "QUIRE_ROW_PROGRAM", "QUIRE_CODED_EXPERTS"
_KNOWN = (CACHE, OFFLINE, API_KEY, ADMIN_KEY, CPU_PATH, CPU_PIN, ROW_PROGRAM, CODED_EXPERTS)
# Kubernetes sets these in every pod for a service whose name begins with quire
_OF_KUBERNETES = re.compile(r"(\w+_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Environment:
    """The values of Quire's environment variables."""

    cache: Path  # QUIRE_CACHE: folder of models and tuning tables; default $XDG_CACHE_HOME/quire or ~/.cache/quire
    offline: bool  # QUIRE_OFFLINE: never use the network
    api_key: str | None = field(default=None, repr=False)  # QUIRE_API_KEY: a server requires it, a client sends it
    admin_key: str | None = field(default=None, repr=False)  # QUIRE_ADMIN_KEY: opens a server's /admin
    cpu_path: str | None = None  # QUIRE_CPU_PATH: the path of the CPU kernels to use instead of the best one
    cpu_pin: bool = False  # QUIRE_CPU_PIN: pin each thread of the CPU kernels to one core
    row_program: bool = True  # QUIRE_ROW_PROGRAM: run steps of one row as one GPU kernel, where supported
    coded_experts: bool = False  # QUIRE_CODED_EXPERTS: use the Hopper kernel of experts in MXFP4, where supported


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables from `variables` (default: the environment of this process). Raises ConfigError for a bad
    value, and for a name that is almost one of these."""
    variables = os.environ if variables is None else variables
    _check_names(variables)
    return Environment(
        cache=_read_cache(variables),
        offline=_read_flag(variables, OFFLINE),
        api_key=variables.get(API_KEY),
        admin_key=variables.get(ADMIN_KEY),
        cpu_path=variables.get(CPU_PATH, "").strip() or None,
        cpu_pin=_read_flag(variables, CPU_PIN),
        row_program=_read_flag(variables, ROW_PROGRAM, default=True),
        coded_experts=_read_flag(variables, CODED_EXPERTS),
    )


def _check_names(variables: Mapping[str, str]) -> None:
    """Raise ConfigError for a mistyped name: a server would run without the key that its operator set."""
    unknown = [name for name in variables if name.partition("_")[0] == "QUIRE" and name not in _KNOWN]
    for name in unknown:
        close = [] if _OF_KUBERNETES.fullmatch(name) else get_close_matches(name, _KNOWN, 1, 0.8)
        if close:
            reason = f"is not a variable of Quire; did you mean {close[0]}?"
            raise ConfigError(name, reason, f"rename or unset it; known: {', '.join(_KNOWN)}")


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of this process with `changes` applied, for a child process."""
    return {**os.environ, **changes}


def set_variables(**variables: str) -> None:
    """Set variables that libraries read later in this process."""
    os.environ.update(variables)


class TorchrunPlace(NamedTuple):
    """The rank of a process that torchrun started."""

    rank: int
    local_rank: int  # rank on its machine
    num_ranks: int


def read_torchrun() -> TorchrunPlace | None:
    """Read the rank from the variables that torchrun sets; None in a process that torchrun did not start."""
    values = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    return TorchrunPlace(*map(int, values)) if all(value.isdigit() for value in values) else None


def _read_cache(variables: Mapping[str, str]) -> Path:
    given = variables.get(CACHE)
    if given is None:
        base = variables.get("XDG_CACHE_HOME", "")
        return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "quire"
    path = Path(given).expanduser() if given.strip() else None
    if path is None or not path.is_absolute():
        raise ConfigError(CACHE, f"must be an absolute path, is {given!r}", "set it to a folder or unset it")
    if path.exists() and not path.is_dir():
        raise ConfigError(CACHE, f"{given} is not a folder", "set it to a folder or unset it")
    return path


def _read_flag(variables: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    value = variables.get(name, "").strip().lower()
    if not value:
        return default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(name, f"must be 0 or 1, is {variables[name]!r}", "set it to 0 or 1, or unset it")
