"""`quire replay`, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.tiers import TierConfig
from quire.serving.cli import main
from recorded_load import RecordedLoad, play_crowd


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load = RecordedLoad(tmp_path_factory.mktemp("run") / "run.jsonl", CacheConfig(4, 24), SchedulerConfig(4, 32, 80))
    for number in range(6):
        load.submit(f"r{number}", [number % 2 + 5] * 16 + [number + 9], max_tokens=24)
    load.run()
    return load.close()


def test_a_recording_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "6 of 6" in out
    assert "timeline: . waiting" in out


def test_a_check_passes_and_fails_by_exit_code(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(file), "--check"]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    changed = tmp_path / "changed.jsonl"
    changed.write_text(file.read_text().replace('"used":', '"used":1'))
    assert main(["replay", str(changed), "--check"]) == 1
    assert "not the same: step call 1: " in capsys.readouterr().out
    assert main(["replay", str(file), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_two_policies_are_compared(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["replay", str(file), "--policy", "lpm", "--against", "fcfs", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "from fcfs to lpm: " in out
    assert " steps, " in next(line for line in out.splitlines() if line.startswith("a step takes"))
    assert "<h2>lpm</h2>" in page.read_text()


def test_another_memory_is_compared_with_the_recorded(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-kv-blocks", "60", "--no-enable-prefix-caching", "--prefix-eviction", "fifo", "--max-num-seqs", "6"]
    assert main(["replay", str(file), *flags, "--against", "recorded", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["cache"]["num_blocks"] for run in told["runs"]] == [24, 60]
    assert told["runs"][1]["scheduler"]["max_num_seqs"] == 6
    assert len(told["changes"]) == 6
    assert 0 < told["cost"]["fitted_steps"] <= told["cost"]["steps"]


def test_swapping_can_be_tried(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-kv-blocks", "14", "--host-cache-blocks", "100", "--preemption", "swap"]
    assert main(["replay", str(file), *flags, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    states = {state for request in run["requests"] for state, *_ in request["timeline"]}
    assert run["summary"]["finished"] == 6
    assert "swapped" in states


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--check", "--policy", "lpm"], "check: runs a recording as it was"),
        (["--policy", "lpm", "--policy-config", '{"ttft": 1}'], "policy_config"),
        (["--preemption", "swap"], "host"),
        (["--rows", "-1"], "rows: must be at least 0"),
        (["--num-kv-blocks", "0"], "num_kv_blocks"),
        (["--check", "--html", "page.html"], "html: is of no use with --check"),
        (["--check", "--rows", "3"], "rows: is of no use with --check"),
        (["--policy", "static", "--host-cache-blocks", "9"], "host_cache_memory: needs blocks allocated on demand"),
        (["--policy", "static", "--preemption", "swap"], "preemption"),
        (["--policy", "static", "--enable-prefix-caching"], "enable_prefix_caching: shares memory"),
        (["--html", "/nowhere/page.html"], "html: /nowhere/page.html cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(file), *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_page_never_takes_the_place_of_its_recording(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    assert main(["replay", str(file), "--html", str(file.parent / "." / file.name)]) == 2
    assert "is the recording itself" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_check_says_when_the_recording_breaks_off(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(file.read_bytes()[:-40])
    assert main(["replay", str(torn), "--check"]) == 0
    assert capsys.readouterr().out.startswith("the recording is incomplete: its last events may be missing\nthe same: ")
    assert main(["replay", str(torn), "--check", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["recording"]["over"]) == (True, None)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiers = TierConfig(host_blocks=16, disk_path="/nowhere", disk_blocks=64)
    path, scheduler = tmp_path_factory.mktemp("run") / "run.jsonl", SchedulerConfig(8, 32, 80, preemption="swap")
    load = RecordedLoad(path, CacheConfig(4, 24, tiers=tiers), scheduler)
    play_crowd(load)
    return load.close()


@pytest.mark.parametrize(
    ("flags", "told", "disk"),
    [
        (["--host-cache-blocks", "40"], None, 64),
        (["--host-cache-blocks", "0", "--preemption", "auto"], "without host memory, disk tier", 0),
        (["--policy", "static"], "static: without prefix cache, host memory, disk tier", 0),
    ],
)
def test_tiers_stay_unless_they_cannot_and_then_it_is_said(
    flags: list[str], told: str | None, disk: int, tiered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tiered), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["cache"]["tiers"]["disk_blocks"] == disk
    assert [line for line in found["without"] if told is not None and told in line] == found["without"]
    assert bool(found["without"]) == (told is not None)
    assert main(["replay", str(tiered), *flags, "--against", "static"]) == 0
    assert "static: without prefix cache, host memory" in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("hello\n")
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
