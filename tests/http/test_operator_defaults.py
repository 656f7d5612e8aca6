"""What an operator sets for requests that say nothing of it: template variables, and the usage of streams."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import MODEL, TestServer
from quire.config.server import ModelSource
from quire.serving.http.service import ModelText
from quire.types.errors import ConfigError
from tests.http.conftest import Serve
from tests.unit.serving.scripted import TOKENIZER

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ mood }},{{ size }}]"


def source(**kwargs: Any) -> ModelSource:
    return ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE, chat_template_kwargs=kwargs)


def prompt(server: TestServer, **fields: Any) -> str:
    answer = server.post(CHAT, {**ASK, "return_prompt_text": True, **fields})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["prompt_text"]
    return text


def test_template_variables_have_the_operators_values_unless_a_request_sets_them(serve: Serve) -> None:
    server = serve(source=source(mood="calm", size=3))
    assert prompt(server) == "hi[calm,3]"
    assert prompt(server, chat_template_kwargs={"mood": "wild"}) == "hi[wild,3]"
    rendered = server.post("/apply-template", {"messages": ASK["messages"]}).json()["prompt"]
    assert rendered == "hi[calm,3]"
    tokenized = server.post("/tokenize", {"messages": ASK["messages"]}).json()
    assert tokenized["count"] == len("hi[calm,3]")


@pytest.mark.parametrize(("template", "reason"), [(TEMPLATE, "it reads: mood, size"), ("{{ a", "does not work")])
def test_a_variable_that_the_template_does_not_read_is_refused_at_the_start(template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"default_chat_template_kwargs.weather: .*{reason}"):
        ModelText(TOKENIZER, template, template_kwargs={"weather": 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASK),
        (CHAT, {**ASK, "stream_options": {"include_usage": False}}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2}),
        ("/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
    ],
)
def test_streams_end_with_their_usage_if_the_operator_wants_it(serve: Serve, path: str, body: dict[str, Any]) -> None:
    plain, forced = serve(), serve(force_include_usage=True)
    assert not any(event.get("usage") for event in plain.events(path, body)[:-1])
    *_, last, done = forced.events(path, body)
    assert (last["choices"], last["usage"]["completion_tokens"], done) == ([], 2, "[DONE]")
    more = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert all(event["usage"] for event in forced.events(path, more)[:-1])
