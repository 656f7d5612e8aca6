"""The names of the scheduling policies, and the settings that some of them have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from quire.types.errors import ConfigError

PolicyName = Literal[
    "fcfs",
    "priority",
    "lpm",
    "spf",
    "fair",
    "deadline",
    "waiting_served_ratio",
    "static",
    "orca-max",
    "orca-pow2",
    "orca-oracle",
]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
# Policies that reserve contiguous blocks for each sequence:
RESERVING: frozenset[str] = frozenset({"static", "orca-max", "orca-pow2", "orca-oracle"})

SETTINGS: dict[PolicyName, tuple[str, ...]] = {
    "priority": ("ageing",),
    "lpm": ("window", "max_overtakes"),
    "spf": ("window", "max_overtakes"),
    "fair": ("input_weight", "output_weight"),
    "deadline": ("ttft", "ttft_per_token", "tpot"),
    "waiting_served_ratio": ("waiting_served_ratio", "max_waiting_tokens"),
}  # the settings of each policy; policies that are not listed have none
DEFAULT_AGEING = 30.0
MAX_SETTING = 10**9


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The settings of all policies. Each policy reads its own. Times are in seconds."""

    ageing: float = DEFAULT_AGEING  # priority: seconds in the queue that lower a request's priority value by one
    window: int = 32  # lpm, spf: how many waiting requests are compared
    max_overtakes: int = 64  # lpm, spf: how many later requests may overtake a request
    input_weight: float = 1.0  # fair: cost of a prompt token
    output_weight: float = 2.0  # fair: cost of a generated token
    ttft: float = 0.5  # deadline: time to first token, plus ttft_per_token per prompt token
    ttft_per_token: float = 0.001  # deadline: additional time to first token per prompt token
    tpot: float = 0.05  # deadline: time between two output tokens
    waiting_served_ratio: float = 0.3  # waiting_served_ratio: decodes pause if waiting / running requests exceed it
    max_waiting_tokens: int = 20  # waiting_served_ratio: steps after which decodes pause at any ratio

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number"
                raise ConfigError("policy_config", f"{field.name} must be {kind}, got {value!r}", "leave it out")
            least, strict = int(field.name == "window"), field.name in ("ageing", "tpot")
            if not least <= value <= MAX_SETTING or (strict and value == 0):
                bound = f"{'above 0' if strict else f'at least {least}'} and at most {MAX_SETTING:,}"
                raise ConfigError("policy_config", f"{field.name} must be {bound}", "choose a number in between")
        if not self.input_weight and not self.output_weight:
            raise ConfigError("policy_config", "input_weight and output_weight are both 0", "raise one of them")


def read_policy(policy: str | None, scheduling_policy: str | None) -> PolicyName:
    """Return the policy given under either name; fcfs if none is given. Raises ConfigError."""
    if policy is not None and scheduling_policy is not None and policy != scheduling_policy:
        reason = f"is {policy!r}, but scheduling_policy, which means the same, is {scheduling_policy!r}"
        raise ConfigError("policy", reason, "give one of them")
    field, name = ("policy", policy) if policy is not None else ("scheduling_policy", scheduling_policy)
    if name is None:
        return "fcfs"
    if name not in POLICY_NAMES:
        raise ConfigError(field, f"{name!r} is unknown", f"use one of {', '.join(POLICY_NAMES)}")
    return name


def read_policy_settings(policy: PolicyName, given: dict[str, Any] | None) -> PolicySettings:
    """Return the given settings of a policy, with defaults for the others. Raises ConfigError."""
    if given is not None and not isinstance(given, dict):
        raise ConfigError("policy_config", f"must be an object, got {given!r}", 'like {"ttft": 1.0}')
    names = SETTINGS.get(policy, ())
    if unknown := [name for name in given or {} if name not in names]:
        fix = f"use some of {', '.join(names)}" if names else "leave policy_config out"
        raise ConfigError("policy_config", f"{unknown[0]!r} is no setting of the {policy!r} policy", fix)
    return PolicySettings(**given or {})
