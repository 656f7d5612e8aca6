"""Files and batches: requests from a file, run in the background, with a result for every line."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from http_server import TestServer, digests
from quire.config.engine import SchedulerConfig
from quire.config.server import AccessConfig
from quire.serving.batch_lines import BatchLine, read_line, result_line
from quire.serving.cli import main
from quire.serving.http.batches import batch_run
from quire.serving.http.batches.runner import BatchRunner
from tests.http.conftest import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_line(name: str, text: str = "hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def as_lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" if not isinstance(row, bytes) else row for row in rows)


def upload(server: TestServer, data: bytes, purpose: str = "batch", **options: Any) -> Any:
    with server.client() as client:
        answer = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": purpose}, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def start(server: TestServer, rows: Sequence[Any], endpoint: str = CHAT, **options: Any) -> Any:
    file = upload(server, as_lines(rows), **options)
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    answer = server.post("/v1/batches", body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(server: TestServer, batch_id: str) -> Any:
    found: list[Any] = []

    def is_over() -> bool:
        found.append(server.get(f"/v1/batches/{batch_id}").json())
        return found[-1]["status"] in ("completed", "failed", "cancelled", "expired")

    server.wait(is_over)
    return found[-1]


def lines_of(server: TestServer, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in server.get(f"/v1/files/{file_id}/content").content.splitlines()]


@pytest.fixture
def client(server: TestServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as one:
        yield one


def test_the_official_client_uploads_runs_and_reads_a_batch(server: TestServer, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", as_lines([chat_line("a"), chat_line("b", "ho")])), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"run": "one"}
    )
    assert batch.status == "validating"
    server.wait(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (2, 2, 0)
    assert done.metadata == {"run": "one"}
    assert done.output_file_id is not None
    results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in results}
    assert texts == {"a": " answer 0 to <user:hi\nbot:>", "b": " answer 0 to <user:ho\nbot:>"}
    assert batch.id in [one.id for one in client.batches.list()]
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_bad_line_has_an_error_of_its_own_and_the_others_are_answered(server: TestServer) -> None:
    rows = [
        chat_line("good"),
        b"{not json}\n",
        b"\n",
        {"custom_id": "no body", "method": "POST", "url": CHAT},
        chat_line("elsewhere") | {"url": COMPLETIONS},
        chat_line("streams", stream=True),
        chat_line("hot", temperature=-1),
        chat_line("good", "again"),
        chat_line("last"),
    ]
    batch = ended(server, start(server, rows)["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 8, "completed": 2, "failed": 6}
    assert {row["custom_id"] for row in lines_of(server, batch["output_file_id"])} == {"good", "last"}
    errors = {
        (row["custom_id"], (row["error"] or {}).get("line")): row for row in lines_of(server, batch["error_file_id"])
    }
    assert "is not JSON" in errors[None, 2]["error"]["message"]
    assert "body: is missing" in errors["no body", 4]["error"]["message"]
    assert f"must be one of {CHAT}" in errors["elsewhere", 5]["error"]["message"]
    assert "stream" in errors["streams", 6]["error"]["message"]
    assert "another line" in errors["good", 8]["error"]["message"]
    refused = errors["hot", None]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "temperature"


def test_completions_run_too_and_an_unknown_endpoint_is_refused(server: TestServer) -> None:
    row = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "abc", "max_tokens": 64}}
    batch = ended(server, start(server, [row], COMPLETIONS)["id"])
    (result,) = lines_of(server, batch["output_file_id"])
    assert result["response"]["body"]["choices"][0]["text"] == " answer 0 to <abc>"
    file = upload(server, as_lines([row]))
    answer = server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/v1/nothing"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "endpoint")


def test_interactive_requests_go_before_the_lines_of_a_batch(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512)
    server = serve(lambda prompt, index: "x" * 40, scheduler=scheduler, step_seconds=0.002)
    most: list[int] = []
    batch = start(server, [chat_line(f"{number}") for number in range(24)])
    server.wait(lambda: server.call(lambda: server.dispatcher.num_in_engine) > 0)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            most.append(server.call(lambda: server.dispatcher.num_in_engine))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert ended(server, batch["id"])["request_counts"]["completed"] == 24
    over.set()
    watcher.join()
    assert max(most) == 2  # half of what the engine can run, so that others find a place at once


def test_a_cancelled_batch_keeps_what_has_finished(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=512)
    server = serve(lambda prompt, index: "x" * 60, scheduler=scheduler, step_seconds=0.002)
    batch = start(server, [chat_line(f"{number}") for number in range(200)])
    server.wait(lambda: server.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 0)
    assert server.post(f"/v1/batches/{batch['id']}/cancel", {}).json()["status"] == "cancelling"
    done = ended(server, batch["id"])
    assert done["status"] == "cancelled"
    counts = done["request_counts"]
    assert 0 < counts["completed"] < counts["total"] == 200
    assert len(lines_of(server, done["output_file_id"])) == counts["completed"]
    again = server.post(f"/v1/batches/{batch['id']}/cancel", {})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "batch_id")
    server.wait(server.is_idle)


def test_a_batch_goes_on_where_a_stopped_server_left_it(serve: Serve, tmp_path: Path) -> None:
    asked: list[str] = []

    def script(prompt: str, index: int) -> str:
        asked.append(prompt)
        return "x" * 30

    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=512)
    first = serve(script, scheduler=scheduler, step_seconds=0.01)
    use_folder(first, tmp_path)
    rows = [chat_line(f"{number}", f"number {number}") for number in range(30)]
    batch = start(first, [*rows[:15], b"broken\n", *rows[15:]])
    first.wait(lambda: sum(map(bool, tmp_path.rglob("*.data"))) > 1 and len(asked) > 8)
    first.close()
    written = next(path for path in tmp_path.rglob("*.data") if b'"status_code"' in path.read_bytes())
    with written.open("ab") as file:
        file.write(b'{"id":"batch_req_half","custom_id":"29","resp')  # it died while it wrote
    finished_before = written.read_bytes().count(b"\n")
    assert 0 < finished_before < 30

    asked.clear()
    second = serve(script, scheduler=scheduler)
    use_folder(second, tmp_path)
    second.call(second.service.batches.resume)
    done = ended(second, batch["id"])
    assert done["request_counts"] == {"total": 31, "completed": 30, "failed": 1}
    results = lines_of(second, done["output_file_id"])
    assert sorted(row["custom_id"] for row in results) == sorted(f"{number}" for number in range(30))
    assert len(asked) == 30 - finished_before
    assert len(lines_of(second, done["error_file_id"])) == 1


def use_folder(server: TestServer, folder: Path) -> None:
    """As `--files-dir` does."""
    service = server.service
    runner = BatchRunner(folder, service.limits, service.dispatcher)
    runner.targets = service.batches.targets

    def change() -> None:
        service.batches.close()
        for name in ("files", "batches", "_gate", "_temporary"):
            setattr(service.batches, name, getattr(runner, name))

    server.call(change)


def test_files_and_batches_of_another_key_are_not_found(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests("one", "two")))
    own, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    file = upload(server, as_lines([chat_line("a")]), headers=own)
    batch = server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": CHAT}, headers=own).json()
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}"):
        assert server.get(path, headers=own).status_code == 200
        assert server.get(path, headers=other).status_code == 404
    assert server.get("/v1/files", headers=other).json()["data"] == []
    assert server.get("/v1/batches", headers=other).json()["data"] == []
    stolen = server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": CHAT}, headers=other)
    assert stolen.status_code == 404


def test_each_key_has_its_own_room(serve: Serve) -> None:
    server = serve(limits={"files": 2, "batches": 1}, access=AccessConfig(key_digests=digests("one", "two")))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    upload(server, b"x", headers=one)
    file = upload(server, b"x", headers=one)
    with server.client() as client:
        full = client.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}, headers=one)
    assert full.json()["error"]["code"] == "too_many_files"
    assert "an API key may store 2 files" in full.json()["error"]["message"]
    upload(server, b"x", headers=two)
    body = {"input_file_id": file["id"], "endpoint": CHAT}
    refused = server.post("/v1/batches", body, headers=one)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_files")


def test_the_results_of_a_batch_count_as_files(serve: Serve) -> None:
    rows = [chat_line(f"{number}") for number in range(8)]
    size = len(as_lines(rows))
    server = serve(limits={"files_bytes": size + 1_500, "batch_requests": 1})
    done = ended(server, start(server, rows)["id"])
    assert done["status"] == "failed"
    assert "cannot be stored" in done["errors"]["data"][0]["message"]
    files = server.get("/v1/files").json()["data"]
    assert len(files) == 2
    assert sum(file["bytes"] for file in files) <= size + 1_500
    assert 0 < len(lines_of(server, done["output_file_id"])) == done["request_counts"]["completed"] < 8


def test_text_that_is_no_unicode_is_an_error_of_its_line(serve: Serve) -> None:
    server = serve()
    half = json.dumps(chat_line("half")).replace('"hi"', '"\\ud800"').encode() + b"\n"
    name = json.dumps(chat_line("name")).replace('"name"', '"\\ud800"').encode() + b"\n"
    done = ended(server, start(server, [half, name, chat_line("good")])["id"])
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    errors = {row["error"]["line"]: row["error"]["message"] for row in lines_of(server, done["error_file_id"])}
    assert errors.keys() == {1, 2}
    assert "lone surrogate" in errors[2]
    server.wait(server.is_idle)


def test_a_batch_whose_run_fails_says_so_and_keeps_its_results(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(limits={"batch_requests": 1})

    def fail(custom_id: str, *args: Any) -> bytes:
        if custom_id == "bad":
            raise RuntimeError("nobody foresaw it")
        return result_line(custom_id, *args)

    monkeypatch.setattr(batch_run, "result_line", fail)
    done = ended(server, start(server, [chat_line("good"), chat_line("bad")])["id"])
    assert done["status"] == "failed"
    assert "cause is in its log" in done["errors"]["data"][0]["message"]
    assert [row["custom_id"] for row in lines_of(server, done["output_file_id"])] == ["good"]
    again = ended(server, start(server, [chat_line("next")])["id"])  # no place was lost
    assert again["status"] == "completed"


def test_batches_that_wait_hold_no_lines(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    server.elsewhere = (1, 1)  # another request waits
    read: list[int] = []

    def note(number: int, *args: Any) -> BatchLine:
        read.append(number)
        return read_line(number, *args)

    monkeypatch.setattr(batch_run, "read_line", note)
    names = [start(server, [chat_line(f"{number}") for number in range(8)])["id"] for _ in range(4)]
    gate = server.service.batches._gate
    server.wait(lambda: len(gate._waiting) == 4 * server.service.limits["batch_requests"])
    assert read == []
    server.elsewhere = (0, 0)
    assert {ended(server, name)["status"] for name in names} == {"completed"}
    assert len(read) == 32


def test_a_batch_with_too_many_lines_or_none_fails_with_the_reason(serve: Serve) -> None:
    server = serve(limits={"batch_lines": 2})
    for rows in ([], [chat_line(name) for name in "abc"]):
        batch = ended(server, start(server, rows)["id"])
        assert batch["status"] == "failed"
        assert "must be in [1, 2]" in batch["errors"]["data"][0]["message"]


def test_the_guide_does_what_it_says(server: TestServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/guides/batches.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"```sh\n(quire run-batch .*?)\n```", page)
    (tmp_path / "in.jsonl").write_text(lines)
    code = code.replace("http://127.0.0.1:8000", server.url).replace('open("in.jsonl", "rb")', "REQUESTS")
    with (tmp_path / "in.jsonl").open("rb") as requests:
        exec(code, names := dict[str, Any](REQUESTS=requests))
    names["client"].close()
    shown = capfd.readouterr().out
    assert shown.startswith("completed BatchRequestCounts(completed=2, failed=0, total=2)")
    assert '"custom_id":"two"' in shown
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in command.split()[1:]]
    assert main([*words, "--url", server.url]) == 0
    assert (tmp_path / "out.jsonl").read_text().count('"status_code": 200') == 2


def test_lines_may_call_the_responses_api(server: TestServer) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "hi", "store": False}}
    batch = ended(server, start(server, [row], "/v1/responses")["id"])
    (result,) = lines_of(server, batch["output_file_id"])
    assert result["response"]["body"]["status"] == "completed"
