"""When something is wrong the page says what, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from playground_hand import ask, expect, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_an_engine_that_is_down_is_announced_and_its_return_too(page: Page, stub: Stub) -> None:
    stub.script.state = "restarting"
    stub.script.refuse = (503, "the engine is not up", {"Retry-After": "2"})
    ask(page, "Anybody?")
    expect(page.locator(".reply .problem")).to_contain_text("The engine is not up. It is loading, restarting")
    expect(page.locator(".reply .problem")).to_contain_text("in 2 seconds")
    expect(page.locator("#notice")).to_contain_text("being restarted")
    expect(page.locator("#status")).to_have_text("engine down")
    stub.script.state, stub.script.refuse = "ok", None
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#notice")).to_be_hidden()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".reply .answer-body")).to_have_text(stub.script.answer)


def test_a_full_queue_says_when_to_come_back(page: Page, stub: Stub) -> None:
    stub.script.refuse = (429, "the queue is full", {"Retry-After": "7"})
    ask(page, "Me too.")
    expect(page.locator(".reply .problem")).to_contain_text("The queue is full.")
    expect(page.locator(".reply .problem")).to_contain_text("Try again in 7 seconds.")


def test_a_refused_parameter_is_shown_in_the_servers_own_words(page: Page, stub: Stub) -> None:
    stub.script.refuse = (400, "max_tokens must be at most 2048", {})
    ask(page, "Much.")
    expect(page.locator(".reply .problem")).to_contain_text("max_tokens must be at most 2048")


def test_a_stream_that_breaks_keeps_its_text_and_names_the_reason(page: Page, stub: Stub) -> None:
    stub.script.break_after = 3
    ask(page, "Go on.")
    wait_for_answer(page)
    expect(page.locator(".reply .answer-body")).to_have_text("Paris is the")
    expect(page.locator(".reply .problem")).to_contain_text("the engine stopped while it wrote this answer")


def test_a_connection_that_breaks_is_not_taken_for_the_end(page: Page, stub: Stub) -> None:
    stub.script.hang_up_after = 3
    ask(page, "Go on.")
    wait_for_answer(page)
    expect(page.locator(".reply .answer-body")).to_have_text("Paris is the")
    expect(page.locator(".reply .problem")).to_contain_text("The connection broke before the answer was complete.")


def test_a_server_that_is_gone_is_told_from_an_engine_that_is_down(page: Page, stub: Stub) -> None:
    page.context.set_offline(True)
    ask(page, "Hello?")
    expect(page.locator(".reply .problem")).to_contain_text("No answer came from the server.")
    expect(page.locator("#notice")).to_contain_text("Check that quire serve still runs.")
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()
    stub.script.answer = "Back."
    ask(page, "Hello again?")
    expect(page.locator(".reply:last-child .answer-body")).to_have_text("Back.")
    assert [message["content"] for message in stub.chats[-1]["messages"]] == ["Hello again?"]


def test_a_server_with_keys_asks_for_one(open_page: Callable[..., Page], stub: Stub) -> None:
    stub.script.api_key = "open sesame"
    page = open_page(f"{stub.url}/", wait=False)
    expect(page.locator("#notice")).to_contain_text("This server asks for an API key.")
    page.fill("#api-key", "open barley")
    page.press("#api-key", "Enter")
    expect(page.locator("#notice")).to_contain_text("did not accept this key")
    page.fill("#api-key", "open sesame")
    page.press("#api-key", "Enter")
    expect(page.locator("#notice")).to_be_hidden()
    ask(page, "May I?")
    wait_for_answer(page)
    expect(page.locator(".reply .answer-body")).to_have_text(stub.script.answer)


def test_broken_storage_is_read_as_no_conversation(page: Page, stub: Stub) -> None:
    turn = '{"id": "a", "parent": null, "role": "user", "text": "x"}'
    hostile = [
        "{not json",
        '{"a": 1}',
        '"text"',
        '{"id": "broken", "title": "t", "updatedAt": 1, "selected": {}, "turns": [{"role": "assistant"}]}',
        f'{{"id": "broken", "title": "t", "updatedAt": 1, "selected": {{}}, "turns": [{turn}, {turn}]}}',
        f'{{"id": "other", "title": "t", "updatedAt": 1, "selected": {{}}, "turns": [{turn}]}}',
    ]
    for value in hostile:
        page.evaluate("value => localStorage.setItem('quire.conversation.broken', value)", value)
        page.reload()
        page.wait_for_selector("#status[data-state=ready]")
        expect(page.locator(".welcome")).to_be_visible()
        expect(page.locator(".conversation")).to_have_count(0)
