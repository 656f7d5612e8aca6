"""Scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.config.engine import SchedulerConfig
from quire.config.policy import PolicyName
from quire.engine.scheduler.policies.base import Policy
from quire.engine.scheduler.policies.deadline import ByDeadline
from quire.engine.scheduler.policies.fair import Fair
from quire.engine.scheduler.policies.fcfs import FirstCome
from quire.engine.scheduler.policies.lpm import LongestPrefix
from quire.engine.scheduler.policies.orca import Orca
from quire.engine.scheduler.policies.priority import ByPriority
from quire.engine.scheduler.policies.spf import ShortestPrompt
from quire.engine.scheduler.policies.static import StaticBatch
from quire.engine.scheduler.policies.waiting_served_ratio import WaitingServedRatio
from quire.types.errors import ConfigError


def make_policy(config: SchedulerConfig) -> Policy:
    """Make the policy that the configuration names, with its settings."""
    settings, orca = config.policy_settings, partial(Orca, max_model_len=config.max_model_len)
    policies: dict[PolicyName, Callable[[], Policy]] = {
        "fcfs": FirstCome,
        "priority": lambda: ByPriority(settings.ageing),
        "lpm": lambda: LongestPrefix(settings.window, settings.max_overtakes),
        "spf": lambda: ShortestPrompt(settings.window, settings.max_overtakes),
        "fair": lambda: Fair(settings.input_weight, settings.output_weight, config.num_rows),
        "deadline": lambda: ByDeadline(settings.ttft, settings.ttft_per_token, settings.tpot),
        "waiting_served_ratio": lambda: WaitingServedRatio(settings.waiting_served_ratio, settings.max_waiting_tokens),
        "static": StaticBatch,
        "orca-max": lambda: orca("orca-max"),
        "orca-pow2": lambda: orca("orca-pow2"),
        "orca-oracle": lambda: orca("orca-oracle"),
    }
    if config.policy not in policies:
        raise ConfigError("policy", f"{config.policy!r} is not known", f"choose one of {', '.join(policies)}")
    return policies[config.policy]()
