"""`quire replay`, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.serving.cli import main
from recorded_load import RecordedLoad


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
    assert "a step takes" in out
    assert "<h2>lpm</h2>" in page.read_text()


def test_another_memory_is_compared_with_the_recorded(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-kv-blocks", "60", "--no-enable-prefix-caching", "--prefix-eviction", "fifo", "--max-num-seqs", "6"]
    assert main(["replay", str(file), *flags, "--against", "recorded", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["cache"]["num_blocks"] for run in told["runs"]] == [24, 60]
    assert told["runs"][1]["scheduler"]["max_num_seqs"] == 6
    assert len(told["changes"]) == 6
    assert told["cost"]["fitted_steps"] > 0


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
        (["--html", "/nowhere/page.html"], "html: /nowhere/page.html cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(file), *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("hello\n")
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
