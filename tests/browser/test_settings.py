"""Settings: presets, output format, tools, the model picker, and requests copied as code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from playground_hand import ask, expect, open_settings, wait_for_answer
from playground_stub import MODEL, Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def sent_after(page: Page, stub: Stub, question: str = "Go") -> dict[str, Any]:
    ask(page, question)
    wait_for_answer(page)
    return stub.chats[-1]


def test_sampling_is_left_to_the_model_until_it_is_set(page: Page, stub: Stub) -> None:
    assert not {"temperature", "top_p", "top_k", "min_p", "seed"} & set(sent_after(page, stub))
    open_settings(page)
    expect(page.locator("#setting-temperature")).to_have_attribute("placeholder", "0.25")  # as the server says
    expect(page.get_by_label("Temperature, slider")).to_have_value("0.25")
    expect(page.locator("#setting-top_p")).to_have_attribute("placeholder", "default")


def test_a_slider_sets_the_number_beside_it_and_the_number_the_slider(page: Page, stub: Stub) -> None:
    open_settings(page)
    slider = page.get_by_label("Temperature, slider")
    slider.fill("0.5")
    expect(page.locator("#setting-temperature")).to_have_value("0.5")
    page.fill("#setting-temperature", "1.25")
    expect(slider).to_have_value("1.25")
    assert sent_after(page, stub)["temperature"] == 1.25
    page.fill("#setting-temperature", "")
    assert "temperature" not in sent_after(page, stub)


def test_a_preset_sets_the_sampling_and_a_changed_value_makes_it_custom(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.fill("#setting-system", "Be kind.")
    page.select_option("#preset", "Precise")
    expect(page.locator("#setting-temperature")).to_have_value("0")
    sent = sent_after(page, stub)
    assert sent["temperature"] == 0
    assert sent["messages"][0]["content"] == "Be kind."
    page.fill("#setting-temperature", "0.1")
    assert page.input_value("#preset") == ""
    page.select_option("#preset", "Model defaults")
    assert "temperature" not in sent_after(page, stub)


def test_a_preset_of_ones_own_is_saved_used_and_deleted(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.fill("#setting-system", "Speak like a pirate.")
    page.fill("#setting-top_k", "7")
    page.fill("#preset-name", "Pirate")
    page.get_by_role("button", name="Save as preset").click()
    assert page.input_value("#preset") == "Pirate"
    page.click("text=Reset all settings")
    page.reload()
    page.select_option("#preset", "Pirate")
    sent = sent_after(page, stub)
    assert (sent["top_k"], sent["messages"][0]["content"]) == (7, "Speak like a pirate.")
    page.get_by_role("button", name="Delete preset").click()
    expect(page.locator("#preset option")).not_to_contain_text(["Pirate"])
    expect(page.locator("#setting-top_k")).to_have_value("7")


def test_a_preset_may_not_take_the_name_of_a_built_in_one(page: Page) -> None:
    open_settings(page)
    page.fill("#preset-name", "Precise")
    page.get_by_role("button", name="Save as preset").click()
    expect(page.locator("#preset-name")).to_have_attribute("aria-invalid", "true")


@pytest.mark.parametrize(
    ("choice", "field", "value", "expected"),
    [
        ("json_object", None, "", {"response_format": {"type": "json_object"}}),
        (
            "json_schema",
            "schema",
            json.dumps(SCHEMA),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
        ("regex", "regex", "[a-z]+", {"structured_outputs": {"regex": "[a-z]+"}}),
        ("choice", "choices", "yes\nno", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ],
)
def test_an_output_format_is_sent_as_the_api_knows_it(
    page: Page, stub: Stub, choice: str, field: str | None, value: str, expected: dict[str, Any]
) -> None:
    open_settings(page)
    page.select_option("#setting-format", choice)
    if field is not None:
        page.fill(f"#setting-{field}", value)
    stub.script.answer = '{"a_b": "*c*", "d_e": 1}'
    sent = sent_after(page, stub)
    assert {name: sent[name] for name in expected} == expected
    assert page.locator(".answer-body pre").text_content() == stub.script.answer  # such an answer is no Markdown
    expect(page.locator(".chip")).to_have_count(1)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schema", "", "This format needs a value here."),
        ("schema", "{", "This is not JSON"),
        ("schema", "[]", "A schema is a JSON object."),
        ("tools", '[{"name": "f"}]', "A list of objects"),
        ("tools", "{}", "A list of objects"),
    ],
)
def test_a_schema_or_tool_that_cannot_be_sent_is_explained(
    page: Page, stub: Stub, field: str, value: str, words: str
) -> None:
    open_settings(page)
    page.select_option("#setting-format", "json_schema" if field == "schema" else "text")
    page.fill(f"#setting-{field}", value)
    ask(page, "Go")
    expect(page.locator(f"#setting-{field}")).to_be_focused()
    expect(page.locator(f"#setting-{field}")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#setting-{field}-help")).to_contain_text(words)
    assert not stub.chats


def test_the_examples_can_be_sent_as_they_are(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.select_option("#setting-format", "json_schema")
    for button in page.locator("text=Insert an example").all():
        button.click()
    sent = sent_after(page, stub)
    assert sent["tools"][0]["function"]["name"] == "get_weather"
    assert sent["response_format"]["json_schema"]["schema"]["required"] == ["city", "population"]


def test_the_picked_model_is_asked_and_remembered(open_page: Callable[..., Page], stub: Stub) -> None:
    stub.script.models = (MODEL, "stub/other")
    page = open_page(f"{stub.url}/")
    assert page.get_by_label("Model", exact=True).locator("option").all_inner_texts() == [MODEL, "stub/other"]
    assert sent_after(page, stub)["model"] == MODEL
    page.select_option("#model", "stub/other")
    assert sent_after(page, stub)["model"] == "stub/other"
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert sent_after(page, stub)["model"] == "stub/other"
    stub.script.models = (MODEL,)
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert sent_after(page, stub)["model"] == MODEL


def copied(page: Page, kind: str) -> str:
    page.get_by_role("button", name=f"Copy as {kind}").click()
    expect(page.locator("#message")).to_have_text(f"Copied as {kind}.")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def fill_awkwardly(page: Page) -> dict[str, Any]:
    """Settings and a message that quoting gets wrong easily; returns what must be sent."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_settings(page)
    page.fill("#setting-system", 'Don\'t say "no" \\ $HOME `id`')
    page.fill("#setting-temperature", "0.3")
    page.fill("#setting-top_k", "5")
    page.select_option("#setting-format", "regex")
    page.fill("#setting-regex", r"[^'\"]+\d")
    page.fill("#prompt", "It's 5 € — \U0001f426\nnew line")
    return {
        "model": MODEL,
        "temperature": 0.3,
        "top_k": 5,
        "max_tokens": 512,
        "structured_outputs": {"regex": r"[^'\"]+\d"},
        "messages": [
            {"role": "system", "content": 'Don\'t say "no" \\ $HOME `id`'},
            {"role": "user", "content": "It's 5 € — \U0001f426\nnew line"},
        ],
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_request_copied_as_curl_sends_what_the_page_would_send(page: Page, stub: Stub) -> None:
    expected = fill_awkwardly(page)
    done = subprocess.run(["sh", "-c", copied(page, "curl")], capture_output=True, text=True, check=False, timeout=60)
    assert stub.chats == [expected], done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == stub.script.answer


def test_the_request_copied_as_python_sends_what_the_page_would_send(page: Page, stub: Stub) -> None:
    pytest.importorskip("openai", reason="needs the openai package")
    expected = fill_awkwardly(page)
    command = [sys.executable, "-c", copied(page, "Python")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert stub.chats == [expected], done.stderr
    assert done.stdout == stub.script.answer + "\n"


def test_a_copied_request_names_the_key_and_never_holds_it(open_page: Callable[..., Page], stub: Stub) -> None:
    stub.script.api_key = "very-secret"
    page = open_page(f"{stub.url}/", wait=False)
    page.fill("#api-key", "very-secret")
    page.press("#api-key", "Enter")
    page.wait_for_selector("#status[data-state=ready]")
    fill_awkwardly(page)
    curl, python = copied(page, "curl"), copied(page, "Python")
    assert "very-secret" not in curl + python
    assert "$QUIRE_API_KEY" in curl
    assert 'os.environ["QUIRE_API_KEY"]' in python
