"""The bench commands as they are called: `serve` against a scripted server, the others over a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.serving.bench import offline as offline_module
from quire.serving.cli import main
from stub_openai import Stub, serve_stub
from tests.unit.serving.conftest import MakeLLM


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serve_stub(Stub(pause=0.002)) as started:
        yield started


def test_an_open_loop_sends_every_request_and_writes_its_report(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "run.json", tmp_path / "run.svg"
    flags = ["--rate", "100", "--rate", "inf", "--num-prompts", "12", "--input-len", "5", "--output-len", "3"]
    files = ["--output", str(output), "--plot", str(plot), "--detail", "--goodput", "ttft:10000"]
    assert main(["bench", "serve", "--url", stub.url, "--warmup", "1", *flags, *files, "--api-key", "hidden-key"]) == 0
    shown = capsys.readouterr().out
    assert "100 requests/s: 12 of 12 requests" in shown
    assert "all at once: 12 of 12 requests" in shown
    assert "goodput" in shown
    assert "this client was late by" in shown
    report = json.loads(output.read_text())
    assert [run["label"] for run in report["runs"]] == ["100 requests/s", "all at once"]
    assert report["model"] == "stub-model"
    for run in report["runs"]:
        assert (run["completed"], run["output_tokens"], run["goodput_share"]) == (12, 36, 1.0)
        assert run["ttft_ms"]["p99"] >= run["ttft_ms"]["p50"] > 0
        assert len(run["timelines"]) == 12
        assert min(timeline["planned_at"] for timeline in run["timelines"]) == 0.0
        assert all(0.0 <= time <= 60.0 for timeline in run["timelines"] for time in timeline["events"])
    assert "hidden-key" not in output.read_text()
    assert plot.read_text().startswith("<svg")
    assert len(stub.asked) == 25
    asked = stub.asked[-1]
    assert (asked["max_tokens"], asked["ignore_eos"], len(asked["prompt"])) == (3, True, 5)


def test_a_closed_loop_speaks_chat_without_extensions_if_told(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--concurrency", "3", "--num-prompts", "7", "--endpoint", "chat", "--no-ignore-eos"]
    extra = ["--extra-body", '{"top_p": 0.5}', "--model", "mine"]
    assert main(["bench", "serve", "--url", stub.url, *flags, *extra, "--input-len", "4"]) == 0
    assert "3 at a time: 7 of 7 requests" in capsys.readouterr().out
    asked = stub.asked[-1]
    assert asked["path"] == "/v1/chat/completions"
    assert len(asked["messages"][0]["content"].split()) == 4
    assert "ignore_eos" not in asked
    assert (asked["top_p"], asked["model"]) == (0.5, "mine")


def test_a_trace_is_replayed_at_a_rate(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([{"prompt_ids": [5, 6], "max_tokens": 2, "unit_gap": 1.0}] * 4))
    assert main(["bench", "serve", "--url", stub.url, "--workload", str(trace), "--rate", "50"]) == 0
    assert "50 requests/s: 4 of 4 requests" in capsys.readouterr().out
    assert stub.asked[-1]["prompt"] == [5, 6]


def test_failures_are_counted_and_make_the_command_fail(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.fail_after = 1
    assert main(["bench", "serve", "--url", stub.url, "--warmup", "0", "--num-prompts", "3"]) == 1
    shown = capsys.readouterr().out
    assert "0 of 3 requests" in shown
    assert "failed 3 x: the engine was restarted" in shown
    stub.refuse = (429, {"error": {"message": "full"}})
    assert main(["bench", "serve", "--url", stub.url, "--warmup", "0", "--num-prompts", "3"]) == 1
    assert "failed 3 x: status 429: full" in capsys.readouterr().out
    assert main(["bench", "serve", "--url", stub.url]) == 1
    assert "the warm-up failed: status 429" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--rate", "1", "--concurrency", "2"], "concurrency: cannot be given together with rate"),
        (["--rate", "0"], "rate: must be above 0"),
        (["--concurrency", "0"], "concurrency: must be at least 1"),
        (["--extra-body", "[1]"], "extra_body: is no JSON object"),
        (["--goodput", "speed:1"], "goodput:"),
        (["--workload", "/no/such/file"], "workload:"),
        (["--num-prompts", "0"], "num_prompts:"),
    ],
)
def test_wrong_settings_are_one_line(flags: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *flags]) == 2
    error = capsys.readouterr().err
    assert cause in error
    assert error.count("\n") == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


class TestOffline:
    @pytest.fixture(autouse=True)
    def _scripted(self, monkeypatch: pytest.MonkeyPatch, make_llm: MakeLLM) -> None:
        monkeypatch.setattr(offline_module, "load", lambda args: make_llm(lambda prompt, index: "words and words " * 8))

    def test_throughput_counts_tokens_a_second(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = tmp_path / "run.json"
        flags = ["--num-prompts", "4", "--input-len", "6", "--output-len", "5", "--repeats", "2"]
        assert main(["bench", "throughput", *flags, "--output", str(output)]) == 0
        assert capsys.readouterr().out.count("4 requests in") == 2
        runs = json.loads(output.read_text())["runs"]
        assert [(run["prompt_tokens"], run["output_tokens"]) for run in runs] == [(24, 20)] * 2

    @pytest.mark.parametrize("command", ["throughput", "latency"])
    def test_lengths_that_do_not_fit_are_refused_by_the_options_to_change(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", command, "--input-len", "200", "--output-len", "1000000"]) == 2
        error = capsys.readouterr().err
        assert "input_len: a request has up to 1000200 tokens, 200 of the prompt and 1000000 of the answer" in error
        assert "lower --input-len or --output-len, or raise --max-model-len" in error

    def test_throughput_takes_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("hello\nworld\n")
        assert main(["bench", "throughput", "--workload", str(prompts), "--output-len", "3"]) == 0
        assert "2 requests in" in capsys.readouterr().out

    def test_latency_tells_first_and_further_tokens_apart(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "run.json"
        flags = ["--batch-size", "2", "--input-len", "4", "--output-len", "6", "--repeats", "2"]
        assert main(["bench", "latency", *flags, "--output", str(output)]) == 0
        assert "batch of 2, 4 in, 6 out, 2 times" in capsys.readouterr().out
        report = json.loads(output.read_text())
        assert min(report["batch_ms"]["p50"], report["ttft_ms"]["p50"]) > 0
        assert main(["bench", "latency", "--output-len", "1"]) == 2
        for flag in ("--batch-size", "--repeats"):
            assert main(["bench", "latency", flag, "0"]) == 2
            assert f"{flag[2:].replace('-', '_')}: must be at least 1, got 0" in capsys.readouterr().err
