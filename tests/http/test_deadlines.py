"""Requests that take too long end with an error of their own, and long texts hold nobody up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from http_server import PATIENCE
from quire.config.engine import SchedulerConfig
from quire.config.server import TimeoutConfig
from quire.serving.http.text_threads import LONG_TEXT, num_text_threads
from quire.serving.text.tokenizer import Tokenizer
from tests.http.conftest import Serve

ROOMY = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=16_000)
ENDLESS = {"prompt": "x", "max_tokens": 15_000, "ignore_eos": True}


def endless(prompt: str, index: int) -> str:
    return "z" * 20_000


def test_a_request_past_its_time_limit_ends_with_504_and_leaves_the_engine(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.005, timeouts=TimeoutConfig(request=0.2))
    answer = server.post("/v1/completions", ENDLESS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    server.wait(server.is_idle)


def test_a_stream_past_its_time_limit_ends_with_an_error_event(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.005, timeouts=TimeoutConfig(request=2.0))
    *_, last, done = server.events("/v1/completions", ENDLESS)
    assert (last["error"]["code"], done) == ("request_timeout", "[DONE]")
    server.wait(server.is_idle)


def test_a_client_may_ask_for_less_time_but_not_for_more(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.005, timeouts=TimeoutConfig(request=30.0))
    answer = server.post("/v1/completions", ENDLESS, headers={"X-Request-Timeout": "0.2"})
    assert answer.status_code == 504
    bounded = serve(endless, scheduler=ROOMY, step_seconds=0.005, timeouts=TimeoutConfig(request=0.2))
    answer = bounded.post("/v1/completions", ENDLESS, headers={"X-Request-Timeout": "1000"})
    assert answer.status_code == 504


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_time_limit_that_is_none_is_refused(serve: Serve, value: str) -> None:
    answer = serve().post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
    assert f"got '{value}'" in answer.json()["error"]["message"]


def test_a_request_that_waits_too_long_for_the_engine_ends_with_503_and_the_running_one_goes_on(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, timeouts=TimeoutConfig(queue=0.3))
    server.link.gate.clear()
    running = {**ENDLESS, "max_tokens": 200}
    with ThreadPoolExecutor(4) as pool:
        asked = pool.submit(server.post, "/v1/completions", running)  # all that the engine runs at once
        server.wait(lambda: server.call(lambda: server.dispatcher.num_in_engine) == 1)
        late = server.post("/v1/completions", running)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        server.link.gate.set()
        server.link.settle()
        assert asked.result(PATIENCE).status_code == 200
    server.wait(server.is_idle)


def test_without_limits_nothing_is_cut_off(serve: Serve) -> None:
    answer = serve().post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 200


def test_long_texts_do_not_hold_up_the_tokenization_of_short_ones(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, entered = threading.Event(), threading.Semaphore(0)
    encode = Tokenizer.encode_batch

    def slow(self: Tokenizer, texts: Any, *args: Any, **kwargs: Any) -> Any:
        if any(len(text) > LONG_TEXT for text in texts):
            entered.release()
            assert free.wait(PATIENCE)
        return encode(self, texts, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode_batch", slow)
    server = serve()
    num_long = 4 * num_text_threads(1)
    with ThreadPoolExecutor(num_long) as pool:
        asked = [pool.submit(server.post, "/tokenize", {"prompt": "word " * 20_000}) for _ in range(num_long)]
        try:
            assert entered.acquire(timeout=PATIENCE)
            assert server.post("/v1/completions", {"prompt": "short"}).status_code == 200
            assert server.post("/tokenize", {"prompt": "short"}).status_code == 200
            assert not any(one.done() for one in asked)
        finally:
            free.set()
        assert {one.result(PATIENCE).status_code for one in asked} == {200}


@pytest.mark.parametrize(("cores", "workers", "threads"), [(1, 1, 2), (2, 1, 2), (8, 1, 8), (64, 1, 16), (64, 16, 4)])
def test_text_threads_scale_with_the_cores_of_an_edge(cores: int, workers: int, threads: int) -> None:
    assert num_text_threads(workers, cores) == threads
