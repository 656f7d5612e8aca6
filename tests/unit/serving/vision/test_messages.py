"""Conversations with images, as the template of Qwen2.5-VL writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.vision import ImageGrid, ImageLimits
from quire.runtime.loading.files import files_at
from quire.serving.text.chat_messages import PLACEHOLDER
from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.tokenizer import load_tokenizer
from quire.serving.vision.image_reader import ImageReader
from quire.serving.vision.messages import ImageTaker
from quire.serving.vision.sources import MediaSources
from quire.types.errors import InvalidRequest
from tiny_served import write_tiny_vision_model

HOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (  # of Qwen2.5-VL, less its videos
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in"
    " content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}"
    "Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def render(*messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(TEMPLATE).render(list(messages), takes_images=True, **options)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_placeholders_stand_where_images_stood() -> None:
    found = render(user(text("first "), PLACEHOLDER, text(" and "), PLACEHOLDER))
    assert found.endswith(f"<|im_start|>user\nfirst {HOLDER} and {HOLDER}<|im_end|>\n<|im_start|>assistant\n")
    assert "Picture 2: <|vision_start|>" in render(user(PLACEHOLDER, PLACEHOLDER), add_vision_id=True)


def test_texts_without_images_are_joined_as_ever() -> None:
    assert "user\none\ntwo<|im_end|>" in render(user(text("one"), text("two")))


def test_tools_are_described_beside_images() -> None:
    before = render(user(PLACEHOLDER, text("what?")), tools=[TOOL])
    assert before.index("look") < before.index(HOLDER) < before.index("what?")
    system = {"role": "system", "content": [PLACEHOLDER]}
    behind = render(system, user(text("what?")), tools=[TOOL])
    assert behind.index(HOLDER) < behind.index("look") < behind.index("what?")


def test_a_tool_may_return_an_image() -> None:
    found = render(user(text("look")), {"role": "tool", "content": [PLACEHOLDER, text("seen")]})
    assert f"<tool_response>\n{HOLDER}seen\n</tool_response>" in found


def test_a_placeholder_is_refused_where_no_images_are_taken() -> None:
    with pytest.raises(InvalidRequest, match="takes text only"):
        ChatTemplate(TEMPLATE).render([user(PLACEHOLDER)])


def test_the_template_of_the_processor_comes_before_that_of_the_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(files_at(folder)).chat_template == TEMPLATE


def test_only_the_last_images_that_a_request_may_have_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    prepared: list[str] = []
    reader = ImageReader(ImageLimits(ImageGrid(token_id=9), max_images=3))
    prepare = ImageReader.prepare
    monkeypatch.setattr(ImageReader, "prepare", lambda *given: prepared.append(given[1]) or prepare(*given))
    taker = ImageTaker(reader, MediaSources(None, 100))
    part = {"type": "image_pil", "image_pil": image.new("RGB", (56, 56))}
    messages = [user(part), user(part), user(text("a")), user(part), user(part)]
    taken, first = taker.take_last(messages, 1)
    assert first == 2
    assert {place: len(images) for place, (_, images) in taken.items()} == {0: 1, 2: 0, 3: 1, 4: 1}
    assert taken[4][0] == user(PLACEHOLDER)
    assert prepared == [f"messages[{place}].content[0].image_pil" for place in (0, 4, 3)]
    with pytest.raises(InvalidRequest, match="one image more than the 3"):
        taker.take(messages)
