"""What no cache can beat is counted right, and a cache that holds everything comes up to it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prefix_cost import control_plane
from benchmarks.prefix_trace_data import Turn, distinct_tokens, most_hits, read_mooncake, synthetic_conversations
from benchmarks.prefix_traces import Case, found_share
from benchmarks.tenant_probe import auc
from quire.config.tiers import EVICTION_NAMES, EvictionName
from quire.simulator.cost import Cost


def turn(at: float, prompt: int, *hashes: int) -> Turn:
    return Turn(at, prompt, 1, hashes=hashes, piece=4)


def test_the_oracle_finds_what_earlier_prompts_began_with() -> None:
    turns = [turn(0, 8, 1, 2), turn(1, 10, 1, 2, 3), turn(2, 8, 1, 4), turn(3, 8, 5, 2), turn(4, 12, 1, 2, 3)]
    assert most_hits(turns) == (0 + 8 + 4 + 0 + 10, 46)
    assert distinct_tokens(turns) == 8 + 4 + 4 + 8


def test_the_last_token_of_a_prompt_counts_as_computed() -> None:
    assert most_hits([turn(0, 8, 1, 2), turn(1, 8, 1, 2)]) == (7, 16)


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_cache_that_holds_everything_comes_up_to_the_oracle(eviction: EvictionName) -> None:
    turns = tuple(synthetic_conversations(60, scale=128))
    hits, queries = most_hits(turns)
    blocks = distinct_tokens(turns) // 4 + 100 * len(turns)
    found = found_share(Case(eviction, blocks, 4, Cost(0.0, 0.0, 0.0), turns))
    assert found == pytest.approx(hits / queries, abs=0.01)
    least = max(each.prompt + each.output for each in turns) // 4 + 2
    assert found_share(Case(eviction, least, 4, Cost(0.0, 0.0, 0.0), turns)) < found


def test_a_mooncake_trace_is_read_in_time_and_scaled(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 600, "output_length": 64, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [0]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_mooncake(path, 32, 0)
    assert (first.at, first.prompt, first.output) == (0.0, 16, 1)
    assert (second.at, second.prompt, second.output) == (2.0, 19, 2)
    assert second.submit(0).prompt_token_ids.tolist() == [1] * 16 + [2] * 3
    path.write_text('{"timestamp": 0}')
    with pytest.raises(SystemExit, match="input_length"):
        read_mooncake(path, 32, 0)


def test_auc_is_the_chance_that_one_is_below_the_other() -> None:
    low, high = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    assert (auc(low, high), auc(high, low), auc(low, low)) == (1.0, 0.0, 0.5)


def test_the_control_plane_runs_with_and_without_the_cache() -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(100), k=20) for _ in range(20)]
    assert all(control_plane(prompts, 4, 4, 512, caching=caching) > 0 for caching in (True, False))
