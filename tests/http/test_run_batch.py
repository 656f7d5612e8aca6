"""`quire run-batch`: a file of requests in, a file of results out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from http_server import TestServer
from quire.serving.cli import main
from tests.http.conftest import Serve
from tiny_served import FLAGS, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def line(name: str, prompt: str = "abc", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def results(path: Path) -> dict[str | None, Any]:
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def run(server: TestServer, source: Path, target: Path) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--concurrency", "4"])


def test_every_line_has_a_result_and_a_bad_one_an_error(
    server: TestServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line(f"{number}", max_tokens=64) for number in range(20)]
    rows[7]["body"]["temperature"] = -1
    source = write(tmp_path / "in.jsonl", [*rows[:10], "not json", "", *rows[10:]])
    target = tmp_path / "out.jsonl"
    assert run(server, source, target) == 0
    found = results(target)
    assert set(found) == {*(f"{number}" for number in range(20)), None}
    assert found["0"]["response"]["body"]["choices"][0]["text"] == " answer 0 to <abc>"
    assert found["7"]["response"]["body"]["error"]["param"] == "temperature"
    assert found[None]["error"]["line"] == 11
    assert "19 requests succeeded, 2 failed" in capsys.readouterr().err


def test_a_second_run_asks_only_for_what_has_not_succeeded(serve: Serve, tmp_path: Path) -> None:
    asked: list[str] = []

    def script(prompt: str, index: int) -> str:
        asked.append(prompt)
        return " said"

    server = serve(script)
    source = write(tmp_path / "in.jsonl", [line(name, name) for name in ("one", "two", "three")])
    target = tmp_path / "out.jsonl"
    done = {"status_code": 200, "request_id": "x", "body": {}}
    write(
        target,
        [
            {"id": "a", "custom_id": "one", "response": done, "error": None},
            {"id": "b", "custom_id": "two", "response": {**done, "status_code": 500}, "error": None},
        ],
    )
    with target.open("a") as file:
        file.write('{"id": "c", "custom_id": "three", "resp')  # the last run was killed here
    assert run(server, source, target) == 0
    assert sorted(asked) == ["three", "two"]
    assert {name: row["response"]["status_code"] for name, row in results(target).items()} == {
        "one": 200,
        "two": 200,
        "three": 200,
    }


def test_what_cannot_work_is_said_before_anything_runs(
    server: TestServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, tmp_path / "nothing", tmp_path / "out") == 2
    assert "input_file" in capsys.readouterr().err
    source = write(tmp_path / "in.jsonl", [line("a")])
    assert run(server, source, tmp_path / "no folder" / "out") == 2
    assert "output_file" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--max-model-len", "64"], ["a-model"], ["-m", "a-model"]])
def test_flags_of_a_server_are_refused_beside_one_that_runs(
    server: TestServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    files = ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *files, "--url", server.url, *flags]) == 2
    assert "is a setting of the server at --url; leave it out" in capsys.readouterr().err
    assert main(["run-batch", *files, "--url", server.url, "--log-level", "error", "--api-key", "x"]) == 0


@pytest.mark.parametrize(
    ("name", "held", "reason"),
    [
        ("in.jsonl", None, "is the input file too"),
        ("link.jsonl", None, "is the input file too"),
        ("folder", None, "is not a plain file"),
        ("notes.txt", "to do:\n", "line 1 of it is not the result of a batch request"),
        ("other.jsonl", '{"custom_id": "a", "method": "POST"}\n', "line 1 of it is not the result of a batch request"),
        ("torn.txt", "no newline", "line 1 of it is not the result of a batch request"),
    ],
)
def test_a_file_that_holds_something_else_is_not_rewritten(
    server: TestServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, held: str | None, reason: str
) -> None:
    source, target = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / name
    (tmp_path / "link.jsonl").symlink_to(source)
    (tmp_path / "folder").mkdir()
    if held is not None:
        target.write_text(held)
    before = source.read_text()
    assert run(server, source, target) == 2
    assert reason in capsys.readouterr().err
    assert source.read_text() == before
    assert held is None or target.read_text() == held
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize(
    "flags",
    [
        *(["--uds", "api.sock"], ["--host", "0.0.0.0"], ["--port", "9"], ["--root-path", "/llm"], ["--no-playground"]),
        *(["--ssl-certfile", "chain.pem"], ["--ssl-keyfile=key.pem"], ["--lora-dir", "/adapters"]),
    ],
)
def test_an_address_for_its_own_server_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *flags])
    assert ended.value.code == 2
    assert f"{flags[0].partition('=')[0]} is a flag of `quire serve`" in capsys.readouterr().err


def test_without_a_url_it_serves_the_model_itself(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    source = write(tmp_path / "in.jsonl", [line("a", max_tokens=4), line("b", max_tokens=4)])
    target = tmp_path / "out.jsonl"
    flags = ["-i", str(source), "-o", str(target), "-m", str(model), *FLAGS, "--kv-cache-memory", "16MiB"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "quire", "run-batch", *flags],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert {row["response"]["status_code"] for row in results(target).values()} == {200}
    assert len(results(target)) == 2
