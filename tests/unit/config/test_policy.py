"""Scheduling policies as settings."""

from __future__ import annotations

from dataclasses import fields

import pytest

from quire.config.arguments import EngineArguments
from quire.config.policy import POLICY_NAMES, SETTINGS, PolicyName, PolicySettings, read_policy, read_policy_settings
from quire.config.resolve import resolve_engine_config
from quire.engine.scheduler.policies.registry import make_policy
from quire.types.errors import ConfigError
from tests.unit.config.machines import LAPTOP, SMALL


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_can_be_chosen_and_made(name: str) -> None:
    config = resolve_engine_config(EngineArguments(policy=name), LAPTOP, SMALL)[0]
    assert config.scheduler.policy == name
    make_policy(config.scheduler)


def test_both_names_of_the_setting_mean_the_same_and_may_not_disagree() -> None:
    assert read_policy(None, None) == "fcfs"
    assert read_policy("fair", None) == read_policy(None, "fair") == read_policy("fair", "fair") == "fair"
    with pytest.raises(ConfigError, match=r"^policy: is 'fair', but scheduling_policy.* is 'lpm'"):
        read_policy("fair", "lpm")
    with pytest.raises(ConfigError, match=r"^policy: 'lifo' is unknown.*waiting_served_ratio"):
        read_policy("lifo", None)


def test_settings_are_read_over_the_defaults() -> None:
    asked = EngineArguments(policy="deadline", policy_config={"ttft": 2, "tpot": 0.2})
    settings = resolve_engine_config(asked, LAPTOP, SMALL)[0].scheduler.policy_settings
    assert settings == PolicySettings(ttft=2, tpot=0.2)
    assert read_policy_settings("fcfs", None) == PolicySettings()


@pytest.mark.parametrize(
    ("policy", "given", "named"),
    [
        ("deadline", {"ageing": 1}, "'ageing' is no setting of the 'deadline' policy.*use some of ttft, "),
        ("fcfs", {"ttft": 1}, "'ttft' is no setting of the 'fcfs' policy.*leave policy_config out"),
        ("priority", {"ageing": 0}, "ageing must be above 0"),
        ("deadline", {"tpot": -1.0}, "tpot must be above 0"),
        ("deadline", {"ttft": -1}, "ttft must be at least 0"),
        ("deadline", {"ttft": float("nan")}, "ttft must be at least 0 and at most 1,000,000,000; choose"),
        ("priority", {"ageing": float("inf")}, "ageing must be above 0 and at most 1,000,000,000; choose"),
        ("fair", {"input_weight": 10**400}, "input_weight must be at least 0 and at most 1,000,000,000; choose"),
        ("lpm", {"window": 10**5000}, "window must be at least 1 and at most 1,000,000,000; choose"),
        ("spf", {"window": 0}, "window must be at least 1"),
        ("lpm", {"window": 1.5}, "window must be a whole number"),
        ("waiting_served_ratio", {"max_waiting_tokens": True}, "max_waiting_tokens must be a whole number"),
        ("fair", {"input_weight": "heavy"}, "input_weight must be a number"),
        ("fair", {"input_weight": 0, "output_weight": 0}, "input_weight and output_weight are both 0"),
        ("fair", [], "must be an object"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(policy: PolicyName, given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^policy_config: {named}"):
        read_policy_settings(policy, given)


def test_every_setting_is_read_by_some_policy() -> None:
    assert {name for names in SETTINGS.values() for name in names} == {field.name for field in fields(PolicySettings)}


def test_policies_that_share_no_memory_have_no_prefix_cache() -> None:
    assert not resolve_engine_config(EngineArguments(policy="orca-max"), LAPTOP, SMALL)[0].cache.enable_prefix_caching
    with pytest.raises(ConfigError, match=r"^enable_prefix_caching.*orca-max"):
        resolve_engine_config(EngineArguments(policy="orca-max", enable_prefix_caching=True), LAPTOP, SMALL)
