"""Who ran, waited and was preempted, as spans, tables and a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.simulator.html import render
from quire.simulator.reader import read_recording
from quire.simulator.replay import replay
from quire.simulator.run import Outcome, Run, StepRun
from quire.simulator.summary import compare, export_changes, export_run, percentiles, summarize
from quire.simulator.text import show_changes, show_run
from quire.simulator.timeline import spans
from quire.simulator.what_if import Scenario
from quire.types.ledger import LedgerEntry, LedgerKind
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from recorded_load import RecordedLoad


def outcome(*entries: tuple[LedgerKind, float, int, str], arrival: float = 0.0, ordinal: int = 0) -> Outcome:
    ledger = tuple(LedgerEntry(*entry) for entry in entries)
    request = Submit(f"r{ordinal}", (1, 2), SamplingParams())
    return Outcome(ordinal, request, arrival, ledger, ("stop",), num_outputs=5)


STORY = outcome(
    ("queued", 0.0, 10, ""),
    ("admitted", 1.0, 0, "waited: no free row"),
    ("cached", 1.0, 4, ""),
    ("chunk", 1.0, 6, ""),
    ("first_token", 2.0, 0, ""),
    ("preempted", 3.0, 12, "no free blocks; recompute est. 5 ms"),
    ("admitted", 5.0, 0, "waited: no free blocks"),
    ("chunk", 5.0, 12, ""),
    ("preempted", 7.0, 0, "no free blocks; swapped 3 blocks, est. 1 ms"),
    ("admitted", 8.0, 0, ""),
    ("finished", 9.0, 5, "stop"),
)
STEPS = [StepRun(float(second), second + 1.0, 0, 1, 1, 1, 0) for second in range(9)]


def test_a_ledger_becomes_spans_without_gaps() -> None:
    told = spans(STORY, STEPS)
    assert [(span.state, span.start, span.end) for span in told] == [
        ("waiting", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
        ("decode", 2.0, 3.0),
        ("preempted", 3.0, 5.0),
        ("prefill", 5.0, 6.0),
        ("decode", 6.0, 7.0),
        ("swapped", 7.0, 8.0),
        ("prefill", 8.0, 9.0),
    ]
    assert "no free row" in told[0].why
    assert "4 tokens were in the cache" in told[1].why
    assert "recompute est. 5 ms; 12 tokens owed" in told[3].why
    assert "12 tokens computed again" in told[4].why


def test_an_outcome_knows_its_times() -> None:
    assert (STORY.waited, STORY.ttft, STORY.latency, STORY.tpot) == (1.0, 2.0, 9.0, 7.0 / 4)


def test_figures_of_nothing_are_nothing() -> None:
    assert percentiles([None]) == {}
    run = Run("empty", CacheConfig(4, 8), SchedulerConfig())
    assert summarize(run)["requests"] == 0
    assert "0 of 0" in show_run(run, 10)
    assert render("empty", [run]).startswith("<!doctype html>")


def test_two_runs_tell_who_got_faster_and_who_slower() -> None:
    def run(name: str, *ends: float) -> Run:
        outcomes = [outcome(("queued", 0, 1, ""), ("finished", end, 5, ""), ordinal=i) for i, end in enumerate(ends)]
        return Run(name, CacheConfig(4, 8), SchedulerConfig(), outcomes, STEPS)

    before, after = run("fcfs", 1.0, 2.0, 3.0), run("lpm", 4.0, 2.001, 1.0)
    assert [change.verdict for change in compare(before, after)] == ["slower", "same", "faster"]
    shown = show_changes(before, after, 40)
    assert "from fcfs to lpm: 1 faster, 1 slower, 1 same" in shown
    assert "+3.000s" in shown
    assert "-2.000s" in shown
    assert [each["verdict"] for each in export_changes(before, after)] == ["slower", "same", "faster"]
    one = show_changes(before, after, 1)
    assert "+3.000s" in one
    assert "-2.000s" not in one
    assert "1 more that changed: --rows 0 shows all" in one


def test_two_timelines_have_one_scale_and_tell_who_was_refused_or_failed() -> None:
    done = outcome(("queued", 0, 1, ""), ("admitted", 0, 0, ""), ("finished", 4.0, 5, ""))
    failed = replace(done, ordinal=1, reasons=("error",), error="the device <was> lost")
    refused = Outcome(2, Submit("a-request-with-a-very-long-name", (1,), SamplingParams()), 1.0, refused="too long")
    sections = CacheConfig(4, 8), SchedulerConfig()
    slow = outcome(("queued", 0, 1, ""), ("admitted", 0, 0, ""), ("finished", 16.0, 5, ""))
    page = render("both", [Run("one", *sections, [done, failed, refused]), Run("two", *sections, [slow])])
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page)]
    assert widths[-1] == pytest.approx(4 * widths[0], abs=0.5)
    assert page.count(">16 s</text>") == 2
    assert "failed: the device &lt;was&gt; lost<title>" in page
    assert "refused: too long<title>" in page
    assert "<td>refused</td><td>1</td><td>0</td>" in page
    assert ">a-request-with-a-very...</text>" in page


def test_a_runs_begin_and_length_are_looked_up_a_few_times_however_long_it_is() -> None:
    reads: list[str] = []

    class Watched(Run):
        @property
        def begin(self) -> float:
            reads.append("begin")
            return 0.0

        @property
        def seconds(self) -> float:
            reads.append("seconds")
            return 9.0

    run = Watched("", CacheConfig(4, 8), SchedulerConfig(), [STORY] * 50, STEPS * 50)
    for tell in (export_run, lambda run: render("", [run]), lambda run: show_run(run, 0)):
        reads.clear()
        tell(run)
        assert len(reads) < 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cache, scheduler = CacheConfig(4, 20), SchedulerConfig(4, 32, 80)
    load = RecordedLoad(tmp_path_factory.mktemp("run") / "run.jsonl", cache, scheduler)
    for number in range(8):
        load.submit(f"<r{number}>", [number + 5] * 12, max_tokens=40)
    load.run()
    return replay(read_recording(load.close())).run


def test_a_table_shows_lanes_and_reasons_and_counts_what_it_leaves_out(run: Run) -> None:
    shown = show_run(run, 3)
    assert "5 more requests: --rows 0 shows all" in shown
    assert "no free" in show_run(run, 0)
    lane = next(line for line in shown.splitlines() if line.startswith("<r0>")).split()[-1]
    assert set(lane) <= set(".=#xs")
    assert "x" in show_run(run, 0).split("timeline\n", 1)[1].rsplit("timeline:", 1)[0]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [name for name, _ in attrs if name in ("src", "href")]
        if tag not in ("meta", "path", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_stands_alone_and_has_a_lane_for_each_request(run: Run) -> None:
    page = render("a & b", [run, run])
    tags = _Tags()
    tags.feed(page)
    assert not tags.open
    assert not tags.links
    assert tags.counts["svg"] == 2
    assert tags.counts["rect"] >= 2 * 8 * 3
    assert "&lt;r0&gt;: waiting" in page or "&lt;r0&gt;: prefill" in page
    assert "a &amp; b" in page


def test_a_run_is_exported_with_all_that_is_known(run: Run) -> None:
    exported = json.loads(json.dumps(export_run(run)))
    assert len(exported["requests"]) == 8
    assert exported["summary"]["preemptions"] == sum(each["preemptions"] for each in exported["requests"]) > 0
    assert exported["requests"][0]["timeline"][0][1] == 0.0
    assert exported["steps"][-1]["num_used"] == 0


def test_requests_that_live_when_a_recording_ends_are_told_of(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=30)
    for _ in range(4):
        load.step()
    load.writer.close()
    recording = read_recording(load.writer.path)
    (alive,) = replay(recording).run.outcomes
    assert not alive.is_over
    assert spans(alive, [])[-1].why == "the recording ends"
    (ended,) = Scenario.from_recording(recording).run("", recording.setup.cache, recording.setup.scheduler).outcomes
    assert ended.num_outputs == 30
