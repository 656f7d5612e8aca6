"""The states of recurrent layers in the configuration and the memory plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.arguments import EngineArguments
from quire.config.kv_cache import lay_out
from quire.config.memory import kv_block_bytes
from quire.config.resolve import resolve_engine_config
from quire.config.sizes import GIB
from quire.types.errors import ConfigError, DoesNotFit
from tests.unit.config.machines import LAPTOP, RECURRENT, SERVER, SMALL

STATE = RECURRENT.recurrent.state_numbers * 4  # type: ignore[union-attr]


def test_a_block_holds_only_what_layers_that_attend_keep() -> None:
    assert kv_block_bytes(RECURRENT, "bfloat16", 16) == 6 * 2 * 512 * 2 * 16
    assert [RECURRENT.place_of(layer) for layer in range(8)] == [0, 1, 2, 0, 3, 4, 5, 1]
    layout = lay_out(RECURRENT.kv_specs, split=False)
    assert (layout.num_planes, layout.num_states) == (6, 18)
    assert layout.state_bytes >= STATE


def test_a_gpu_has_room_for_two_states_of_each_row_and_some_more() -> None:
    config, plan = resolve_engine_config(EngineArguments(device="cuda:0"), SERVER, RECURRENT)
    rows = config.scheduler.num_rows
    assert config.cache.groups.num_states == 2 * rows + 16
    assert plan.groups.num_states == 2 * rows + 16
    assert 18 * STATE <= plan.state_bytes <= 1.5 * 18 * STATE
    assert plan.states <= (plan.states + plan.kv_cache) / 3
    assert plan.total <= plan.capacity
    assert "states" in str(plan)


def test_a_machine_with_little_memory_runs_fewer_sequences_at_once_unless_it_is_told_how_many() -> None:
    config, plan = resolve_engine_config(EngineArguments(), LAPTOP, RECURRENT)
    assert config.scheduler.num_rows < 64
    rows = config.scheduler.num_rows
    assert config.cache.groups.num_states >= rows + rows // 2 + 1
    assert plan.states <= GIB / 3
    told, _ = resolve_engine_config(EngineArguments(max_num_seqs=24), LAPTOP, RECURRENT)
    assert (told.scheduler.num_rows, told.cache.groups.num_states) == (24, 37)


def test_states_are_part_of_the_memory_that_is_given_for_the_cache() -> None:
    given = EngineArguments(device="cuda:0", kv_cache_memory="8GiB", max_num_seqs=16)
    config, plan = resolve_engine_config(given, SERVER, RECURRENT)
    assert config.cache.groups.num_states == 48
    assert 7.9 * GIB < plan.states + plan.kv_cache <= 8 * GIB


def test_states_that_do_not_fit_are_refused_by_the_number_of_sequences() -> None:
    given = EngineArguments(max_num_seqs=500, max_model_len=4_096)
    with pytest.raises(DoesNotFit, match="max_num_seqs"):
        resolve_engine_config(given, replace(LAPTOP, available_memory=6 * GIB), RECURRENT)
    given = EngineArguments(max_num_seqs=64, kv_cache_memory="256MiB", max_model_len=256)
    with pytest.raises(DoesNotFit, match="kv_cache_memory"):
        resolve_engine_config(given, LAPTOP, RECURRENT)


def test_drafts_by_first_layers_that_are_recurrent_are_refused() -> None:
    given = EngineArguments(speculative_config={"method": "self_draft", "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"speculative_config\.method.*first layers"):
        resolve_engine_config(given, LAPTOP, RECURRENT)


def test_a_draft_model_may_not_have_states_and_its_target_may() -> None:
    given = EngineArguments(speculative_config={"method": "draft_model", "model": "d", "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"speculative_config\.model.*recurrent layers"):
        resolve_engine_config(given, LAPTOP, SMALL, RECURRENT)
    draft = replace(SMALL, vocab_size=RECURRENT.vocab_size)
    config, _ = resolve_engine_config(given, SERVER, RECURRENT, draft)
    assert config.cache.groups.num_states > config.scheduler.num_rows


def test_the_virtual_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_layout"):
        resolve_engine_config(EngineArguments(kv_layout="virtual"), LAPTOP, RECURRENT)


@pytest.mark.parametrize("policy", ["static", "orca-max"])
def test_policies_that_reserve_memory_are_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="states") as refused:
        resolve_engine_config(EngineArguments(policy=policy), LAPTOP, RECURRENT)
    assert refused.value.setting == "policy"
