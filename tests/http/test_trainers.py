"""What trainers call between two steps: they end requests, empty the cache, and let lines of batches wait while the
engine sleeps. The paths, fields and answers are those of vLLM and SGLang."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from http_server import TestServer, digests
from quire.config.arguments import EngineArguments
from quire.config.server import AccessConfig
from quire.serving.cli import main
from quire.serving.cli.remote import Server
from quire.serving.http.admin_paths import ADMIN_ENDS, INSTEAD
from quire.serving.http.batches import batch_run
from tests.http.conftest import Serve
from tests.http.test_batches import chat_line, ended, lines_of, start
from tests.http.test_lifecycle import LASTING, ROOMY, Ask, endless
from tests.http.test_run_batch import line, results, write
from tests.http.test_standby import FakeMemory

ADMIN = {"Authorization": "Bearer admin"}
ACCESS = AccessConfig(admin_digests=digests("admin"))


def say(prompt: str, index: int) -> str:
    return "yes"


def sleeping_server(serve: Serve, memory: FakeMemory, **settings: Any) -> TestServer:
    server = serve(say, access=ACCESS, **settings)
    for name in ("sleep", "wake_up", "check_weights", "apply_weights"):
        setattr(server.link.core.executor, name, getattr(memory, name))
    return server


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def server(serve: Serve, memory: FakeMemory, tmp_path: Path) -> TestServer:
    (tmp_path / "weights" / "good").mkdir(parents=True)
    return sleeping_server(serve, memory, engine=EngineArguments(weights_dir=str(tmp_path / "weights")))


@pytest.fixture
def busy(serve: Serve) -> TestServer:
    return serve(endless, scheduler=ROOMY, access=ACCESS, step_seconds=0.005)


def post(server: TestServer, path: str, body: Any = None) -> httpx.Response:
    answer: httpx.Response = server.post(path, {} if body is None else body, headers=ADMIN)
    return answer


def ask(server: TestServer) -> int:
    status: int = server.post("/v1/completions", {"prompt": "a", "max_tokens": 20}).status_code
    return status


def live(server: TestServer) -> int:
    found: int = server.call(lambda: len(server.dispatcher.requests()))
    return found


# ------------------------------------------------------------------------------------------------------- aborting
def begun(server: TestServer, *names: str) -> list[Ask]:
    asked = [Ask(server, **LASTING, request_id=name) for name in names]
    server.wait(lambda: live(server) == len(names) and all(row["state"] != "queued" for row in rows(server)))
    return asked


def rows(server: TestServer) -> Any:
    return server.get("/admin/requests", headers=ADMIN).json()["requests"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/abort_request", {"rid": "a"}), ("/abort_request", {"rid": "cmpl-a", "abort_all": False}),
     ("/abort_requests", {"request_ids": ["a", "gone"]})],
)  # fmt: skip
def test_an_aborted_request_answers_with_what_it_has(busy: TestServer, path: str, body: Any) -> None:
    one, other = begun(busy, "a", "b")
    assert post(busy, path, body).json()["aborted"] == 1
    answer = one.result()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert live(busy) == 1
    assert post(busy, "/abort_request", {"rid": "gone"}).json() == {"aborted": 0}
    assert live(busy) == 1
    assert post(busy, "/abort_requests").json() == {"status": "aborted", "aborted": 1}
    assert other.result().json()["choices"][0]["finish_reason"] == "abort"


def test_all_requests_are_aborted_and_those_that_wait_for_the_engine_end_with_an_error(serve: Serve) -> None:
    busy = serve(endless, access=ACCESS, step_seconds=0.005)
    asked = [Ask(busy, **LASTING, request_id=f"r{number}") for number in range(40)]
    busy.wait(lambda: live(busy) == 40 and {"queued", "running"} <= {row["state"] for row in rows(busy)})
    assert post(busy, "/abort_request", {"abort_all": True}).json() == {"aborted": 40}
    answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} == {200, 503}
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 503} == {"aborted"}
    busy.wait(busy.is_idle)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": "", "abort_all": False}, "rid"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
        ("/abort_request", {"rid": 5}, "body.rid"),
        ("/abort_requests", {"request_ids": "a"}, "body.request_ids"),
        ("/abort_requests", {"ids": ["a"]}, "body.ids"),
        ("/flush_cache", {"now": True}, "body.now"),
        ("/reset_prefix_cache?reset_external=true", {}, "reset_external"),
    ],
)
def test_a_wrong_request_names_its_field(server: TestServer, path: str, body: Any, field: str) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


# ---------------------------------------------------------------------------------------------- cache and the rest
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"), ("GET", "/flush_cache")]
)
def test_the_cache_is_emptied(server: TestServer, method: str, path: str) -> None:
    prompt = {"prompt": "a long prompt that fills some blocks of the cache, and is cached", "max_tokens": 1}
    assert server.post("/v1/completions", prompt).status_code == 200
    server.wait(lambda: server.get("/admin/stats", headers=ADMIN).json()["blocks"]["cached"] > 0)
    answer = post(server, path) if method == "POST" else server.get(path, headers=ADMIN)
    assert answer.status_code == 200
    assert server.get("/admin/stats", headers=ADMIN).json()["blocks"]["cached"] == 0


@pytest.mark.parametrize("path", INSTEAD)
def test_an_operation_that_is_missing_says_what_to_use(server: TestServer, path: str) -> None:
    for answer in (post(server, path, {"any": "thing"}), server.get(path, headers=ADMIN)):
        assert answer.status_code == 501
        assert path in answer.json()["error"]["message"]
        assert any(known in answer.json()["error"]["message"] for known in ("/update_weights_from_disk", "/get_weight"))


@pytest.mark.parametrize("path", ADMIN_ENDS)
def test_without_the_admin_key_nothing_happens(server: TestServer, path: str, memory: FakeMemory) -> None:
    for answer in (server.post(path, {}), server.get(path), server.post(f"/v1{path}/", {})):
        assert answer.status_code == 401
    assert memory.calls == []


def test_the_pages_of_trainers(server: TestServer) -> None:
    assert server.get("/get_world_size", headers=ADMIN).json() == {"world_size": 1}
    assert server.get("/weight_info", headers=ADMIN).json()["weight_version"] == "default"
    assert server.get("/health_generate").json() == {"status": "ok"}
    assert post(server, "/pause?mode=wait").json()["status"] == "paused"
    assert post(server, "/resume").json()["status"] == "resumed"
    for path in ("/pause_generation", "/continue_generation"):
        assert post(server, path).json()["status"] == "ok"


def test_the_memory_of_one_kind_is_given_back_and_taken_again(server: TestServer) -> None:
    assert post(server, "/release_memory_occupation", {"tags": ["kv_cache"]}).json()["asleep"] == ["kv_cache"]
    assert post(server, "/release_memory_occupation", {"tags": ["weights"]}).json()["asleep"] == ["weights", "kv_cache"]
    assert post(server, "/resume_memory_occupation", {"tags": ["weights"]}).json()["asleep"] == ["kv_cache"]
    assert ask(server) == 503
    assert post(server, "/resume_memory_occupation", {"tags": None}).json()["asleep"] == []
    assert ask(server) == 200
    answer = post(server, "/release_memory_occupation", {"tags": ["cuda_graph"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tags"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("load_format", "safetensors", "body.load_format"), ("keep_pause", True, "body.keep_pause"),
     ("is_async", True, "body.is_async"), ("manifest", {}, "body.manifest"), ("token_step", 3, "body.token_step"),
     ("abort_all_requests", True, "abort_all_requests")],
)  # fmt: skip
def test_a_field_of_an_update_that_would_do_nothing_is_refused(
    server: TestServer, memory: FakeMemory, field: str, value: Any, named: str
) -> None:
    answer = post(server, "/update_weights_from_disk", {"model_path": "good", "mode": "wait", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert memory.calls == []


def test_an_update_with_all_defaults_of_sglang_s_client_is_taken(server: TestServer, memory: FakeMemory) -> None:
    defaults = {
        "model_path": "good", "load_format": None, "abort_all_requests": False, "weight_version": None,
        "is_async": False, "torch_empty_cache": False, "keep_pause": False, "recapture_cuda_graph": False,
        "token_step": 0, "flush_cache": True, "manifest": None,
    }  # fmt: skip
    assert post(server, "/update_weights_from_disk", defaults).json()["success"]
    assert memory.calls[-1] == "applied"


def test_an_update_ends_as_it_would_have_when_its_client_is_gone(server: TestServer, memory: FakeMemory) -> None:
    begins, may_end = threading.Event(), threading.Event()

    def slow() -> bool:
        begins.set()
        assert may_end.wait(60)
        memory.calls.append("applied")
        return False

    server.link.core.executor.apply_weights = slow
    with ThreadPoolExecutor(1) as pool:
        body = {"model_path": "good", "weight_version": "step-9"}
        impatient = pool.submit(
            httpx.post, f"{server.url}/update_weights_from_disk", json=body, headers=ADMIN, timeout=0.5
        )
        assert begins.wait(60)
        with pytest.raises(httpx.TimeoutException):
            impatient.result(60)
        may_end.set()
    server.wait(lambda: memory.calls[-1:] == ["applied"])
    state = server.get("/get_weight_version", headers=ADMIN).json()
    assert (state["weight_version"], state["has_weights"]) == ("step-9", True)
    assert ask(server) == 200


def test_two_updates_at_once_are_carried_out_one_after_the_other(server: TestServer, memory: FakeMemory) -> None:
    with ThreadPoolExecutor(2) as pool:
        bodies = [{"model_path": "good", "weight_version": str(number)} for number in range(2)]
        answers = list(pool.map(lambda body: post(server, "/update_weights_from_disk", body).json(), bodies))
    assert {answer["weight_version"] for answer in answers} == {"0", "1"}
    assert [call if call == "applied" else "checked" for call in memory.calls] == ["checked", "applied"] * 2


# ------------------------------------------------------------------------------------------------------- sleeping
def test_a_sleeping_server_is_alive_and_not_ready_unless_a_request_wakes_it_up(server: TestServer) -> None:
    assert server.get("/ready").status_code == 200
    post(server, "/sleep")
    assert server.get("/health").status_code == 200
    answer = server.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_asleep")
    post(server, "/wake_up")
    assert server.get("/ready").status_code == 200
    post(server, "/sleep?level=2")
    post(server, "/wake_up")
    assert server.get("/ready").status_code == 503  # it has no weights
    post(server, "/update_weights_from_disk")
    assert server.get("/ready").status_code == 200
    link: Any = server.link
    link.do(link.core.standby.nap)
    assert server.get("/ready").status_code == 200
    assert ask(server) == 200


def test_lines_of_a_batch_wait_while_the_engine_sleeps(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "ASLEEP_SECONDS", 0.01)
    monkeypatch.setattr(batch_run, "MAX_TRIES", 2)
    post(server, "/sleep")
    seen = watch_refusals(server)
    batch = start(server, [chat_line("a"), chat_line("b")])
    server.wait(lambda: len(seen) > 6)  # each line was refused more often than it may fail
    assert server.get(f"/v1/batches/{batch['id']}").json()["request_counts"] == {
        "total": 2,
        "completed": 0,
        "failed": 0,
    }
    post(server, "/wake_up")
    done = ended(server, batch["id"])
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert {row["custom_id"] for row in lines_of(server, done["output_file_id"])} == {"a", "b"}


def test_a_batch_wakes_an_engine_up_that_sleeps_because_it_was_idle(server: TestServer) -> None:
    link: Any = server.link
    link.do(link.core.standby.nap)
    done = ended(server, start(server, [chat_line("a")])["id"])
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_run_batch_waits_while_the_engine_sleeps(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serving.cli.run_batch.MAX_TRIES", 2)
    answers: list[int] = []
    plain = Server.post

    def noted(self: Server, path: str, body: bytes) -> Any:
        answer = plain(self, path, body)
        answers.append(answer.status)
        if len(answers) == 5:  # more often than a line may fail
            post(server, "/wake_up")
        return answer

    monkeypatch.setattr(Server, "post", noted)
    post(server, "/sleep")
    source, target = write(tmp_path / "in.jsonl", [line("one")]), tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url]) == 0
    assert answers == [503] * 5 + [200]
    assert results(target)["one"]["response"]["status_code"] == 200


def watch_refusals(server: TestServer) -> list[Any]:
    """The requests that the engine refuses from now on."""
    core, found = server.link.core, list[Any]()
    submit = core.submit

    def noted(request: Any) -> Any:
        try:
            return submit(request)
        except Exception:
            found.append(json.dumps(str(request.request_id)))
            raise

    core.submit = noted
    return found
