"""What a request leaves out is as the model's makers recommend, in every endpoint that generates."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import SamplingDefaults
from tests.http.conftest import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
DEFAULTS = SamplingDefaults(temperature=0.25, top_k=7, top_p=0.5, repetition_penalty=1.5, max_tokens=9)


def sampled_with(server: TestServer, path: str, body: dict[str, Any]) -> SamplingParams:
    """The sampling with which the engine computes a request."""
    executor = server.executor
    assert executor is not None
    seen: list[SamplingParams] = []
    launch = executor.launch

    def watch(plan: Any) -> None:
        seen.extend(new.sampling for new in plan.new_rows)
        launch(plan)

    executor.launch = watch  # type: ignore[method-assign]
    try:
        answer = server.post(path, body)
    finally:
        executor.launch = launch  # type: ignore[method-assign]
    assert answer.status_code == 200, answer.text
    return seen[0]


@pytest.fixture
def recommended(serve: Serve) -> TestServer:
    return serve(lambda prompt, index: "x" * 40, sampling_defaults=DEFAULTS)


def test_a_chat_that_sets_nothing_is_sampled_as_recommended(recommended: TestServer) -> None:
    sampling = sampled_with(recommended, CHAT, HI)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.max_tokens == 9


def test_every_field_of_a_request_replaces_one_value(recommended: TestServer) -> None:
    sampling = sampled_with(recommended, CHAT, {**HI, "temperature": 0, "top_k": -1, "max_tokens": 3})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.0, 0, 0.5, 3)


def test_a_completion_is_sampled_as_recommended_but_keeps_its_own_length(recommended: TestServer) -> None:
    sampling = sampled_with(recommended, COMPLETIONS, {"prompt": "p"})
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 16)


def test_a_shortest_length_above_the_recommended_longest_is_kept(recommended: TestServer) -> None:
    sampling = sampled_with(recommended, CHAT, {**HI, "min_tokens": 20})
    assert sampling.min_tokens == 20


def test_a_beam_search_takes_no_recommendation(recommended: TestServer) -> None:
    sampling = sampled_with(recommended, COMPLETIONS, {"prompt": "p", "use_beam_search": True, "n": 2})
    assert (sampling.temperature, sampling.repetition_penalty, sampling.top_k) == (0.0, 1.0, 0)


def test_models_tell_what_is_recommended(recommended: TestServer, serve: Serve) -> None:
    for model in recommended.get("/v1/models").json()["data"]:
        assert model["default_sampling_params"] == DEFAULTS.given()
    assert serve().get("/v1/models").json()["data"][0]["default_sampling_params"] == {}


def test_without_recommendations_the_apis_own_defaults_hold(serve: Serve) -> None:
    sampling = sampled_with(serve(), CHAT, HI)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
