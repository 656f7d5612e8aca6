"""Asking and being answered."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from playground_hand import ask, expect, open_settings, wait_for_answer
from playground_stub import MODEL, Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = "one two three four five six seven eight nine ten " * 20


def test_an_answer_is_on_the_page_while_it_is_still_being_written(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, LONG
    ask(page, "Count.")
    expect(page.locator(".reply .answer-body")).to_contain_text("one two three")
    assert page.locator(".reply.writing").count() == 1
    expect(page.locator("#send")).to_have_accessible_name("Stop")
    page.click("#send")


def test_a_finished_answer_shows_its_text_and_its_facts(page: Page, stub: Stub) -> None:
    ask(page, "What is the capital of France?")
    wait_for_answer(page)
    assert page.inner_text(".reply .answer-body") == stub.script.answer
    expect(page.locator(".facts").first).to_contain_text("7 tokens")
    expect(page.locator("#model")).to_have_value(MODEL)


def test_the_request_carries_the_controls_and_nothing_that_is_left_to_the_server(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.fill("#setting-system", "Be brief.")
    page.fill("#setting-temperature", "0.33")
    page.fill("#setting-top_k", "40")
    page.fill("#setting-seed", "7")
    page.fill("#setting-stop", "END\n###")
    ask(page, "Hello")
    wait_for_answer(page)
    sent = stub.chats[0]
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (sent["temperature"], sent["top_k"], sent["seed"], sent["stop"]) == (0.33, 40, 7, ["END", "###"])
    assert sent["model"] == MODEL
    assert not {"top_p", "min_p", "presence_penalty", "repetition_penalty", "logprobs", "tools"} & set(sent)


def test_stop_ends_the_request_and_keeps_what_came(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, LONG
    ask(page, "Count.")
    expect(page.locator(".reply .answer-body")).to_contain_text("one two")
    page.click("#send")
    wait_for_answer(page)
    expect(page.locator(".answer-note")).to_have_text("Stopped.")
    expect(page.locator(".reply .answer-body")).to_contain_text("one two")
    expect(page.locator("#send")).to_have_accessible_name("Send")
    _until(page, lambda: bool(stub.hung_up))
    assert not stub.live


def test_the_conversation_goes_on_and_survives_a_reload(page: Page, stub: Stub) -> None:
    ask(page, "First?")
    wait_for_answer(page)
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert page.inner_text(".reply .answer-body") == stub.script.answer
    ask(page, "Second?")
    expect(page.locator(".reply .facts")).to_have_count(2)
    roles = [message["role"] for message in stub.chats[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_the_ledger_says_in_words_where_the_time_went(page: Page, stub: Stub) -> None:
    ask(page, "Why so slow?")
    wait_for_answer(page)
    page.get_by_role("button", name="Timing").click()
    ledger = page.locator(".reply .ledger")
    expect(ledger).to_contain_text("It was given rows and blocks. Waited: no free blocks.")
    expect(ledger).to_contain_text(
        'The prefix cache ended before token 7, " so". From there on the prompt differs from request before.'
    )
    expect(ledger).to_contain_text("It was preempted and lost the blocks of 48 computed tokens. No free blocks.")
    expect(ledger).to_contain_text("It finished with 7 tokens. The model ended it, or a stop text did.")
    expect(ledger.locator(".phase-key li")).to_have_count(6)
    widths = ledger.locator(".phase-bar .phase").evaluate_all("parts => parts.map(p => p.clientWidth)")
    assert widths[5] == max(widths)  # the second stretch of decoding, 1.38 of 1.9 seconds


def test_a_whole_answer_can_be_had_by_keyboard_alone(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, LONG
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link past everything else
    page.keyboard.type("Count")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("slowly.")
    page.keyboard.press("Enter")
    expect(page.locator(".reply .answer-body")).to_contain_text("one two")
    page.keyboard.press("Escape")
    expect(page.locator(".answer-note")).to_have_text("Stopped.")
    assert stub.chats[0]["messages"][0]["content"] == "Count\nslowly."


def test_a_control_out_of_its_bounds_is_explained_and_not_sent(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.fill("#setting-temperature", "9")
    page.click("[data-toggle=settings]")  # a closed panel opens again for what must be corrected
    ask(page, "Hello")
    expect(page.locator("#setting-temperature")).to_be_focused()
    expect(page.locator("#setting-temperature-help")).to_have_text("A number from 0 to 2.")
    assert not stub.chats


def _until(page: Page, condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come true within five seconds")


def test_the_address_keeps_no_key(open_page: Callable[..., Page], stub: Stub) -> None:
    page = open_page(f"{stub.url}/#admin=secret-of-mine")
    assert not re.search("secret", page.url)
    assert page.evaluate("Object.keys(localStorage).every(k => !localStorage[k].includes('secret-of-mine'))")
