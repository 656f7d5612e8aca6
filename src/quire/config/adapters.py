"""Settings of LoRA adapters: how many an engine keeps, where, and which it loads at the start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.types.errors import ConfigError

DEFAULT_SLOTS = 8
DEFAULT_RANK = 16
MAX_RANK = 256
MAX_SLOTS = 1_024
HOST_SHARE = 4  # default number of adapters in host memory per slot
_FORM = 'use name=path or {"name": ..., "path": ...}'


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of LoRA adapters. The rows of one step use at most `slots` different adapters."""

    slots: int  # device slots
    max_rank: int
    host_adapters: int  # kept in host memory; others are read again from their folders when needed
    experts: bool = False  # adapters may change routed experts, so slots hold matrices for all experts


def host_adapters(config: AdapterConfig | None) -> int:
    """Return how many adapters are kept in host memory; 0 without LoRA."""
    return 0 if config is None else config.host_adapters


class AdapterModule(NamedTuple):
    """An adapter that the engine loads at its start."""

    name: str
    folder: str


def resolve_adapters(
    *, enable: bool, slots: int | None, max_rank: int | None, host_adapters: int | None, experts: bool = False
) -> AdapterConfig | None:
    """Return the LoRA settings, or None if LoRA is off. Raises ConfigError."""
    given = {"max_loras": slots, "max_lora_rank": max_rank, "max_cpu_loras": host_adapters}
    for name, flag in (("enable_lora", enable), ("lora_experts", experts)):
        if not isinstance(flag, bool):
            raise ConfigError(name, f"must be true or false, got {flag!r}")
    if not enable:
        given["lora_experts"] = experts or None
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    name, "is for LoRA adapters, and enable_lora is off", "set enable_lora, or leave it out"
                )
        return None
    for name, most in (("max_loras", MAX_SLOTS), ("max_lora_rank", MAX_RANK), ("max_cpu_loras", None)):
        value = given[name]
        if value is None:
            continue
        if type(value) is not int or value < 1 or (most is not None and value > most):
            limit = f"in [1, {most}]" if most is not None else "of at least 1"
            raise ConfigError(name, f"must be a whole number {limit}, got {value!r}", "choose another")
    num_slots = slots or min(DEFAULT_SLOTS, host_adapters or DEFAULT_SLOTS)
    if host_adapters is not None and host_adapters < num_slots:
        reason = f"is {host_adapters}, below max_loras={num_slots}: adapters on the device are kept in host memory too"
        raise ConfigError("max_cpu_loras", reason, f"set it to {num_slots} or more")
    return AdapterConfig(num_slots, max_rank or DEFAULT_RANK, host_adapters or HOST_SHARE * num_slots, experts)


def read_modules(given: object, *, enable: bool) -> tuple[AdapterModule, ...]:
    """Parse `lora_modules`: a mapping of names to folders, or a list whose entries are name=path or {"name": ...,
    "path": ...}, the latter also as JSON text. Raises ConfigError."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        given = [{"name": name, "path": path} for name, path in given.items()]
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ConfigError("lora_modules", f"cannot be a {type(given).__name__}", f"give a list, and {_FORM}")
    modules = tuple(_read_module(each) for each in given)
    if modules and not enable:
        raise ConfigError("lora_modules", "are LoRA adapters, and enable_lora is off", "set enable_lora")
    names = [module.name for module in modules]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError("lora_modules", f"have the name {repeated[0]!r} twice", "give each another name")
    return modules


def _read_module(given: object) -> AdapterModule:
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError("lora_modules", f"{given!r:.80} is no JSON: {error}", _FORM) from None
    elif isinstance(given, str):
        before, is_pair, after = given.partition("=")
        if not is_pair:
            raise ConfigError("lora_modules", f"{given!r:.80} has no path", _FORM)
        given = {"name": before, "path": after}
    if not isinstance(given, Mapping):
        raise ConfigError("lora_modules", f"{given!r:.80} is no adapter", _FORM)
    fields: dict[str, Any] = {name: value for name, value in given.items() if name != "base_model_name"}
    if unknown := sorted(map(str, set(fields) - {"name", "path"})):
        raise ConfigError("lora_modules", f"{unknown[0]!r} is no field of an adapter", _FORM)
    name, path = fields.get("name"), fields.get("path")
    if not isinstance(name, str) or not name or not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError("lora_modules", f"{dict(given)!r:.80} has no name or no path", _FORM)
    return AdapterModule(name, str(Path(path).absolute()))


def read_lora_dir(given: object, *, enable: bool) -> str | None:
    """Return the real path of `lora_dir`, the folder from which clients may load adapters. Raises ConfigError unless it
    is a folder."""
    if given is None or given == "":
        return None
    if not isinstance(given, str | os.PathLike):
        raise ConfigError("lora_dir", f"cannot be a {type(given).__name__}", "give a folder")
    if not enable:
        raise ConfigError("lora_dir", "is a folder of LoRA adapters, and enable_lora is off", "set enable_lora")
    return _real_folder("lora_dir", given)


def read_weights_dir(given: object) -> str | None:
    """Return the real path of `weights_dir`, the folder from which clients may load weights. Raises ConfigError unless
    it is a folder."""
    if given is None or given == "":
        return None
    if not isinstance(given, str | os.PathLike):
        raise ConfigError("weights_dir", f"cannot be a {type(given).__name__}", "give a folder")
    return _real_folder("weights_dir", given)


def _real_folder(setting: str, given: str | os.PathLike[str]) -> str:
    if not Path(given).is_dir():
        raise ConfigError(setting, f"{os.fspath(given)!r} is no folder", "give one that is there")
    return os.path.realpath(given)
