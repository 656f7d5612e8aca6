"""Images over HTTP: `quire serve` with a tiny model that takes them, in processes of its own, and every refusal."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config.vision import ImageGrid, ImageLimits
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.generation.job import prepare_job
from quire.serving.http.request_head import RequestHead
from real_server import RealServer
from tests.http.conftest import Serve
from tests.unit.serving.vision.test_tile_prompts import write_smolvlm
from tiny_served import FLAGS, write_tiny_vision_model

Image = pytest.importorskip("PIL.Image")
LIMITS = (
    "--limit",
    "image_bytes=100000",
    "--limit",
    "image_pixels=250000",
    "--limit",
    "images_pixels=300000",
    "--limit-mm-per-prompt",
    '{"image": 2}',
)


def picture(seed: int, width: int = 40, height: int = 24) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Any, kind: str = "PNG") -> str:
    data = io.BytesIO()
    image.save(data, kind)
    return base64.b64encode(data.getvalue()).decode()


def part(image: Any = None, **address: Any) -> dict[str, Any]:
    given = {"url": f"data:image/png;base64,{encoded(image)}"} if image is not None else {}
    return {"type": "image_url", "image_url": {**given, **address}}


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder = write_tiny_vision_model(folder / "model")
        (folder / "media").mkdir()
        picture(1).save(folder / "media" / "one.png")
        self.media = folder / "media"
        flags = (*FLAGS, *LIMITS, "--allowed-local-media-path", str(self.media))
        self.server = RealServer(self.folder, flags)

    def ask(self, *parts: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, "temperature": 0, **more}
        with self.server.client() as client:
            return client.post(path, json=body)

    def answer(self, *parts: Any, **more: Any) -> tuple[list[int], dict[str, Any]]:
        found = self.ask(*parts, return_token_ids=True, ignore_eos=True, **more)
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["token_ids"], found.json()["usage"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    one = Case(tmp_path_factory.mktemp("served"))
    yield one
    one.server.close()


def test_answers_are_those_of_the_offline_api(case: Case) -> None:
    text = {"type": "text", "text": "what is this?"}
    conversations = [[part(picture(1)), text], [text, part(picture(2, 16, 16)), part(picture(1))], [text]]
    with LLM(case.folder, load_format="dummy", dtype="float32", threads=1, num_kv_blocks=64) as llm:
        messages = [[{"role": "user", "content": parts}] for parts in conversations]
        outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    for parts, output in zip(conversations, outputs, strict=True):
        tokens, usage = case.answer(*parts)
        assert tokens == list(output.outputs[0].token_ids)
        assert usage["prompt_tokens"] == len(output.prompt_token_ids)


def test_a_file_of_the_folder_is_the_same_image_and_is_found_in_the_cache(case: Case) -> None:
    first, _ = case.answer(part(picture(1)))
    again, usage = case.answer(part(url=f"file://{case.media}/one.png"))
    assert again == first
    assert usage["prompt_tokens_details"]["cached_tokens"] > 15
    _, other = case.answer(part(picture(3)))
    assert other["prompt_tokens_details"]["cached_tokens"] < 15


def test_streams_and_several_samples_take_images(case: Case) -> None:
    found = case.ask(part(picture(4)), stream=True, n=2)
    assert found.status_code == 200
    assert found.text.endswith("data: [DONE]\n\n")


def test_anthropics_blocks_are_taken_and_counted(case: Case) -> None:
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": encoded(picture(1))},
    }
    body = {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "hi"}]}], "max_tokens": 4}
    with case.server.client() as client:
        found = client.post("/v1/messages", json=body)
        counted = client.post("/v1/messages/count_tokens", json={"messages": body["messages"]})
        fetched = client.post(
            "/v1/messages",
            json={
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}],
                    }
                ],
                "max_tokens": 4,
            },
        )
    assert found.status_code == 200, found.text
    _, usage = case.answer(part(picture(1)), {"type": "text", "text": "hi"})
    usages = found.json()["usage"]
    assert usages["input_tokens"] + usages.get("cache_read_input_tokens", 0) == usage["prompt_tokens"]
    assert counted.json()["input_tokens"] == usage["prompt_tokens"]
    assert fetched.status_code == 400
    assert "nothing is fetched" in fetched.text


def test_tiles_are_counted_before_a_request_as_in_its_answer(tmp_path: Path) -> None:
    server = RealServer(write_smolvlm(tmp_path), FLAGS)
    image = {"type": "base64", "media_type": "image/png", "data": encoded(picture(1, 45, 30))}
    asked = [{"role": "user", "content": [{"type": "image", "source": image}, {"type": "text", "text": "what?"}]}]
    try:
        with server.client() as client:
            found = client.post("/v1/messages", json={"messages": asked, "max_tokens": 2})
            counted = client.post("/v1/messages/count_tokens", json={"messages": asked})
            engine = client.get("/v1/capabilities").json()["engine"]
    finally:
        server.close()
    assert found.status_code == counted.status_code == 200, found.text
    assert counted.json()["input_tokens"] == found.json()["usage"]["input_tokens"] > 7 * 4
    assert engine["images"] == {"max_images": 16, "min_pixels": 16**2, "max_pixels": 10 * 16**2}


def test_anthropics_blocks_are_refused_by_their_own_fields(case: Case) -> None:
    """Also where the messages that the model is shown are others: a system prompt, and results of tools."""
    good, text = encoded(picture(1)), {"type": "text", "text": "hi"}
    before = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
    ]
    for source, field in [
        ({"type": "base64", "media_type": "image/png", "data": "AA"}, "source: is not valid base64"),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "source: "),
        ({"type": "base64", "media_type": "image/svg", "data": good}, "source: is of type 'image/svg'"),
        ({"type": "url", "url": "https://a/b.png"}, "source.url: is an address on the network"),
    ]:
        result = {"type": "tool_result", "tool_use_id": "x", "content": "y"}
        content = [result, text, {"type": "image", "source": source}]
        body = {"system": "Be brief.", "messages": [*before, {"role": "user", "content": content}], "max_tokens": 4}
        with case.server.client() as client:
            found = client.post("/v1/messages", json=body)
        assert found.status_code == 400
        assert found.json()["error"]["message"].startswith(f"messages[2].content[2].{field}"), found.text
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": good}}
    body = {"system": "s", "messages": [{"role": "user", "content": [image] * 3}], "max_tokens": 4}
    with case.server.client() as client:
        many = client.post("/v1/messages", json=body)
    assert many.json()["error"]["message"].startswith("messages[0].content[2]: ")


def test_responses_take_images_and_remember_them(case: Case) -> None:
    image = {"type": "input_image", "image_url": part(picture(5))["image_url"]["url"]}
    text = {"type": "input_text", "text": "hi"}
    _, usage = case.answer(part(picture(5)), {"type": "text", "text": "hi"})
    with case.server.client() as client:
        body = {"input": [{"role": "user", "content": [image, text]}], "max_output_tokens": 4, "temperature": 0}
        first = client.post("/v1/responses", json={**body, "truncation": "auto"})
        assert first.status_code == 200, first.text
        after = {"input": "and?", "previous_response_id": first.json()["id"], "max_output_tokens": 4}
        second = client.post("/v1/responses", json=after)
        missing = client.post("/v1/responses", json={"input": [{"role": "user", "content": [{"type": "input_image"}]}]})
        fetched = {"type": "input_image", "image_url": "https://example.com/a.png"}
        network = client.post("/v1/responses", json={"input": [{"role": "user", "content": [text, fetched]}]})
        spoken = {"role": "assistant", "content": [image]}
        misplaced = client.post("/v1/responses", json={"input": [spoken]})
    assert first.json()["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert second.json()["usage"]["input_tokens"] > usage["prompt_tokens"]
    assert (missing.status_code, network.status_code, misplaced.status_code) == (400, 400, 400)
    assert "input[0].content[0].image_url" in missing.text
    assert "nothing is fetched" in network.text
    assert "only text is supported here" in misplaced.text


def test_a_conversation_with_too_many_images_loses_its_oldest_messages(case: Case) -> None:
    def shown(count: int, seed: int) -> dict[str, Any]:
        image = {"type": "input_image", "image_url": part(picture(seed, 16, 16))["image_url"]["url"]}
        return {"role": "user", "content": [image] * count}

    def ask(*messages: dict[str, Any], **more: Any) -> httpx.Response:
        with case.server.client() as client:
            return client.post("/v1/responses", json={"input": list(messages), "max_output_tokens": 4, **more})

    last = [shown(1, 3), shown(1, 4)]
    assert ask(shown(1, 2), *last).status_code == 400
    cut = ask(shown(1, 2), *last, truncation="auto")
    assert cut.status_code == 200, cut.text
    assert "the oldest 1 messages were left out to fit the limits of images" in cut.text
    assert cut.json()["usage"]["input_tokens"] == ask(*last).json()["usage"]["input_tokens"]
    alone = ask(shown(3, 5), truncation="auto")
    assert alone.status_code == 400
    assert "one image more than the 2" in alone.text


def test_what_was_sent_of_images_is_not_kept_while_a_request_runs(serve: Serve) -> None:
    service = serve().service
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
    job = prepare_job(
        service, CHAT.generation, CHAT.fields_by_name, body, RequestHead("a", False, "", False, False, 0.0)
    )
    assert "messages" not in job.options.parameters
    assert job.options.parameters["max_tokens"] == 4


def test_tokenize_counts_images_and_other_endpoints_refuse_them(case: Case) -> None:
    messages = [{"role": "user", "content": [part(picture(1)), {"type": "text", "text": "hi"}]}]
    _, usage = case.answer(*messages[0]["content"])
    with case.server.client() as client:
        assert client.post("/tokenize", json={"messages": messages}).json()["count"] == usage["prompt_tokens"]
        refused = client.post("/apply-template", json={"messages": messages})
        ollama = client.post("/api/chat", json={"model": "x", "messages": [{"role": "user", "images": ["AAAA"]}]})
    assert (refused.status_code, ollama.status_code) == (400, 400)
    assert "messages[0].content[0]: is an image, which this endpoint does not take" in refused.text
    assert "takes text only" in ollama.text


def test_capabilities_say_what_is_taken(case: Case) -> None:
    with case.server.client() as client:
        engine = client.get("/v1/capabilities").json()["engine"]
    assert engine["images"] == {"max_images": 2, "min_pixels": 256, "max_pixels": 4_096}


REFUSED: list[tuple[list[dict[str, Any]], str, str]] = [
    ([part(url="https://example.com/a.png")], "messages[0].content[0].image_url.url", "nothing is fetched"),
    ([part(url="file:///etc/passwd")], "messages[0].content[0].image_url.url", "outside of the folder"),
    ([part(url="data:image/png;base64,AAAA")], "messages[0].content[0].image_url.url", "cannot be decoded"),
    ([part(url="data:image/png;base64,***")], "messages[0].content[0].image_url.url", "not valid base64"),
    ([part(url="data:text/plain;base64,AAAA")], "messages[0].content[0].image_url.url", "is of type"),
    ([part(url=5)], "messages[0].content[0].image_url.url", "must be a URL"),
    ([part()], "messages[0].content[0].image_url.url", "is missing"),
    ([{"type": "image_url"}], "messages[0].content[0].image_url", "is missing"),
    ([{"type": "image"}], "messages[0].content[0]", "has no image"),
    ([{"type": "input_audio"}], "messages[0].content[0]", "takes text and images"),
    ([part(picture(1, 600, 600))], "messages[0].content[0].image_url.url", "more than 100,000 bytes"),
    ([part(Image.new("RGB", (600, 600)))], "messages[0].content[0].image_url.url", "limit 250,000"),
    ([part(Image.new("RGB", (400, 400)))] * 2, "messages[0].content[1].image_url.url", "limit 300,000 in all"),
    ([part(url="file://[x/a")], "messages[0].content[0].image_url.url", "not the path of a local file"),
    ([part(Image.new("RGB", (900, 4)))], "messages[0].content[0].image_url.url", "200 times"),
    ([part(picture(1))] * 3, "messages[0].content[2]", "one image more than the 2"),
    ([part(picture(1)), {"type": "text", "text": "<|image_pad|>"}], "messages", "2 placeholders of images"),
    ([{"type": "text", "text": "<|image_pad|>"}], "prompt", "placeholders of images"),
]


@pytest.mark.parametrize(("parts", "field", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_refused_with_its_field(
    case: Case, parts: list[dict[str, Any]], field: str, reason: str
) -> None:
    found = case.ask(*parts)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert reason in error["message"]
    assert error["param"] == field


def test_what_images_cannot_do_is_refused(case: Case) -> None:
    cut = case.ask(part(picture(1)), truncate_prompt_tokens=4)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    strict = case.ask(part(picture(1), detail="high"), path="/v1/chat/completions?strict=true")
    assert strict.status_code == 400
    assert "has no effect" in strict.text
    assert case.ask(part(picture(1), detail="high")).status_code == 200
    long = case.ask(*[{"type": "text", "text": "x" * 440}, part(picture(1, 64, 64))])
    assert long.status_code == 400
    assert "max_model_len" in long.text


def test_forks_of_running_requests_keep_the_image_and_of_ended_ones_are_refused(case: Case) -> None:
    found = case.ask(part(picture(1)), request_id="shown")
    assert found.status_code == 200
    with case.server.client() as client:
        fork = client.post("/v1/fork", json={"request_id": "shown", "at_token": 1, "max_tokens": 2})
    assert fork.status_code == 400
    assert "placeholders of images" in fork.text


def test_a_model_for_text_refuses_images(serve: Serve) -> None:
    server = serve()
    body = {"messages": [{"role": "user", "content": [part(picture(1))]}], "max_tokens": 4}
    with server.client() as client:
        found = client.post("/v1/chat/completions", json=body)
        image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        answer = client.post("/v1/responses", json={"input": [{"role": "user", "content": [image]}]})
        engine = client.get("/v1/capabilities").json()["engine"]
    for each in (found, answer):
        assert each.status_code == 400
        assert "takes text only" in each.json()["error"]["message"]
    assert engine["images"] is None


def test_pixels_that_are_held_are_bounded(serve: Serve) -> None:
    service = serve().service
    service.pixels.max_bytes = 100
    with service.holding_pixels(1_000):  # alone, any size fits
        with service.holding_pixels(0), pytest.raises(Exception, match="too many images"), service.holding_pixels(1):
            pass
        assert service.pixels.num_bytes == 1_000
    assert service.pixels.num_bytes == 0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"messages": "hi"}', "quire-text"),
        (b'{"messages": [{"content": [{"type": "image_url"}]}]}', "quire-long-text"),
        (b'{"messages": [{"content": [{"type": "\\u0069mage_url"}]}]}', "quire-long-text"),
        (b'{"input": "hi", "previous_response_id": "resp_1"}', "quire-long-text"),
        (b'{"messages": "' + b"x" * 70_000 + b'"}', "quire-long-text"),
    ],
)
def test_small_bodies_with_images_hold_up_no_text(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, body: bytes, name: str
) -> None:
    server = serve()
    service = server.service
    texts_only = server.call(lambda: service.dispatcher.known_engine)
    ran = asyncio.run_coroutine_threadsafe(service.in_thread_of(body[:1_000], threading.current_thread), server.loop)
    assert ran.result(120).name.startswith("quire-text")
    images = ImageLimits(ImageGrid(token_id=9))
    monkeypatch.setattr(service.dispatcher, "known_engine", replace(texts_only, images=images))
    ran = asyncio.run_coroutine_threadsafe(service.in_thread_of(body, threading.current_thread), server.loop)
    assert ran.result(120).name.startswith(name)
