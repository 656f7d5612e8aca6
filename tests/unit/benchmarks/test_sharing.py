from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plot import save_plot
from benchmarks.sharing import Saving, bars, measure
from fake_executor import VOCAB, FakeExecutor
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore

PROMPTS = [[place % 7 + 1 for place in range(start, start + 20)] for start in (0, 3)]


def saving(way: str, count: int) -> Saving:
    cache = CacheConfig(block_size=4, num_blocks=200, enable_prefix_caching=False)
    core = EngineCore(FakeExecutor(200, 4), cache, SchedulerConfig(max_num_seqs=16, max_model_len=64), VOCAB)
    found = measure(core, "short", PROMPTS, way, count, 8)
    core.close()
    return found


def test_one_sample_shares_nothing() -> None:
    assert saving("sampling", 1).saved == 0.0


@pytest.mark.parametrize("way", ["sampling", "beam search"])
def test_more_sequences_of_a_request_save_more(way: str) -> None:
    two, four = saving(way, 2), saving(way, 4)
    assert 0.0 < two.saved < four.saved < 1.0
    assert (two.mean_prompt, two.mean_output) == (20.0, 8.0)


def test_samples_share_exactly_the_full_blocks_of_their_prompt_while_they_decode() -> None:
    """Each of two samples holds 5 blocks of the prompt, which are in use once, and up to 2 of its own."""
    found = saving("sampling", 2)
    assert found.held - found.used <= 5 * 2 * 9  # blocks, requests, steps at most
    assert found.held - found.used >= 5 * 2 * 6


def test_the_plot_has_a_bar_for_every_count(tmp_path: Path) -> None:
    panels = bars([saving("sampling", 2), saving("sampling", 4)])
    save_plot(tmp_path / "plot.svg", panels)
    text = (tmp_path / "plot.svg").read_text()
    assert "sampling 2" in text
    assert "sampling 4" in text
