"""The policies benchmark: its clock, what it counts of the memory, and that every command draws and prints."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from benchmarks import policies
from benchmarks.gpu.models import MODELS
from benchmarks.policy_replay import Arrival, MappingCost, Replay, at_rate, page_tokens, read_arrivals
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.simulator.cost import Cost
from quire.types.output import TokensOut

COST = Cost(step=1.0, token=0.1, row=0.5)
SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
SMALL = ["--requests", "12", "--kv-slots", "4096", "--max-num-seqs", "8", "--max-model-len", "2048"]


def test_the_clock_moves_by_what_steps_cost() -> None:
    arrivals = [Arrival(2.0, prompt=10, output=3), Arrival(50.0, prompt=20, output=1)]
    run = Replay(COST, CacheConfig(4, 64), SCHEDULER).run(arrivals)
    assert run.ttft == pytest.approx([1 + 1, 1 + 2])
    assert run.last == pytest.approx([2 + 2 + 2 * 1.5, 53])
    assert run.tpot == pytest.approx([1.5])
    assert run.seconds == pytest.approx(51)
    assert run.throughput == pytest.approx(4 / 51)


def test_the_virtual_layout_pays_for_every_page_that_a_row_gets() -> None:
    assert page_tokens(MODELS["llama-3.1-8b"].kv_numbers * 2) == 16
    arrivals = [Arrival(0.0, prompt=10, output=3)]
    mapping = MappingCost(COST.step, COST.token, COST.row, 100.0)
    runs = [Replay(cost, CacheConfig(4, 64, False), SCHEDULER).run(arrivals) for cost in (COST, mapping)]
    assert runs[1].seconds - runs[0].seconds == pytest.approx(3 * 100)  # 12 tokens are computed


def test_memory_is_split_into_what_is_used_reserved_never_used_and_free() -> None:
    arrivals = [Arrival(0.0, prompt=8, output=8), *[Arrival(0.0, prompt=4, output=60)] * 2]
    cache = CacheConfig(4, 16, enable_prefix_caching=False)
    watch = policies.MemoryWatch(arrivals, cache, steps=policies.LOOK_EVERY - 1)
    shares: list[list[float]] = []

    def look(core: policies.EngineCore, now: float, out: TokensOut) -> None:
        if not shares:
            watch(core, now, out)
            shares.append(watch.mean())

    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, policy="orca-max")
    Replay(COST, cache, scheduler, look).run(arrivals)
    assert shares == [pytest.approx([8 / 64, 8 / 64, 48 / 64, 0.0])]


def test_a_trace_keeps_its_own_times_and_is_scaled_to_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.6805900,9000,100", "2023-11-16 18:15:54.7,10,0"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    arrivals = read_arrivals(trace, 0, max_model_len=1_000)
    assert [(arrival.prompt, arrival.output) for arrival in arrivals] == [(374, 44), (900, 100)]
    assert arrivals[1].at - arrivals[0].at == pytest.approx(4.0)
    assert [arrival.at for arrival in at_rate(arrivals, rate=0.5)] == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize("command", policies.COMMANDS)
def test_every_command_prints_a_table_and_draws_a_plot(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, out = tmp_path / "plot.svg", tmp_path / "out.json"
    small = {"figures": ["--rates", "1", "4"], "memory": [], "rates": ["--rates", "1", "4"]}
    sizes = SMALL + small[command] if command in small else ["--requests", "60", "--rates", "10"]
    where = ["--plot", str(plot), "--out", str(out)]
    rates = ["--policies", "fcfs", "static"] if command == "rates" else []
    monkeypatch.setattr(sys, "argv", ["policies", command, *sizes, *where, *rates])
    monkeypatch.setattr(policies, "FLOOD", 20)
    policies.main()
    printed = capsys.readouterr().out
    assert f"# {command}: synthetic lengths" in printed
    if command == "figures":
        assert "# memory: synthetic lengths" in printed
        assert all(
            f"| {name}" in printed for name in ("static", "orca-max", "orca-pow2", "orca-oracle", "paged", "virtual")
        )
    assert ET.parse(plot).getroot().tag.endswith("svg")
    assert "<rect" in plot.read_text()
    assert out.exists()


def test_shared_beginnings_are_found_in_the_cache() -> None:
    arrivals = [Arrival(50.0 * place, 40, 2, family=place % 2, shared=32) for place in range(6)]
    run = Replay(COST, CacheConfig(4, 64), SCHEDULER).run(arrivals)
    assert run.prefix_hits == 4 * 32
    assert run.prefix_queries == 6 * 40
    assert np.isfinite(run.first).all()
