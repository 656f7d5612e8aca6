"""Branches: edit any turn, try again, continue after a cut, branch at a token, and tool calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from playground_hand import ask, choose, conversation, expect, open_settings, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def contents(body: dict[str, Any]) -> list[str | None]:
    return [message["content"] for message in body["messages"]]


def press(page: Page, name: str, nth: int = -1) -> None:
    page.get_by_role("button", name=name, exact=True).nth(nth).click()


def test_trying_again_keeps_both_answers_as_versions(page: Page, stub: Stub) -> None:
    ask(page, "Which?")
    wait_for_answer(page)
    stub.script.answer = "Another."
    press(page, "Try again")
    expect(page.locator(".reply .answer-body")).to_have_text("Another.")
    assert stub.chats[0]["messages"] == stub.chats[1]["messages"]
    expect(page.locator(".version")).to_have_text("2 / 2")
    press(page, "Previous version")
    expect(page.locator(".reply .answer-body")).to_have_text("Paris is the capital of France.")
    expect(page.get_by_role("button", name="Previous version")).to_be_disabled()
    page.reload()
    expect(page.locator(".version")).to_have_text("1 / 2")


def test_an_edited_question_branches_and_the_old_branch_can_be_gone_back_to(page: Page, stub: Stub) -> None:
    ask(page, "First?")
    wait_for_answer(page)
    ask(page, "Second?")
    expect(page.locator(".reply .facts")).to_have_count(2)
    page.locator(".question").first.hover()
    press(page, "Edit message", 0)
    editor = page.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    editor.fill("First, edited?")
    stub.script.answer = "A new branch."
    page.get_by_role("button", name="Send", exact=True).first.click()
    expect(page.locator(".reply .answer-body")).to_have_text("A new branch.")
    assert contents(stub.chats[2]) == ["First, edited?"]
    press(page, "Previous version", 0)
    expect(page.locator(".bubble")).to_have_text(["First?", "Second?"])
    ask(page, "Third?")
    expect(page.locator(".reply .facts")).to_have_count(3)
    assert contents(stub.chats[3])[0::2] == ["First?", "Second?", "Third?"]


def test_an_edit_can_be_cancelled_by_escape(page: Page, stub: Stub) -> None:
    ask(page, "First?")
    wait_for_answer(page)
    press(page, "Edit message")
    page.keyboard.type("nonsense")
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_text("First?")
    assert len(stub.chats) == 1


def test_an_edited_answer_is_what_the_conversation_continues_with(page: Page, stub: Stub) -> None:
    ask(page, "Capital?")
    wait_for_answer(page)
    press(page, "Edit answer")
    page.get_by_label("Edit the answer").fill("It is Lyon")
    press(page, "Save as new version")
    expect(page.locator(".answer-note")).to_have_text("Edited by you.")
    stub.script.answer = ", some say."
    press(page, "Continue")
    expect(page.locator(".reply .answer-body")).to_have_text("It is Lyon, some say.")
    sent = stub.chats[1]
    assert sent["messages"][-1] == {"role": "assistant", "content": "It is Lyon"}
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)


def test_an_answer_cut_at_the_limit_is_continued_by_a_fork_of_its_request(page: Page, stub: Stub) -> None:
    stub.script.limit, stub.script.answer = 3, "One two three four five six."
    ask(page, "Count.")
    wait_for_answer(page)
    expect(page.locator(".answer-note")).to_have_text("Cut at the token limit.")
    stub.script.limit, stub.script.answer = None, " four five six."
    press(page, "Continue")
    expect(page.locator(".reply .answer-body")).to_have_text("One two three four five six.")
    [fork] = stub.forks
    assert fork["request_id"].startswith("id-chat-")
    assert fork["index"] == 0
    assert "messages" not in fork
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    assert len(conversation(page)["turns"]) == 2


def test_each_of_several_answers_is_continued_from_its_own_place(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.fill("#setting-n", "2")
    stub.script.limit, stub.script.answer = 2, "One two three."
    ask(page, "Count.")
    wait_for_answer(page)
    stub.script.answer = " three four."
    press(page, "Continue")
    expect(page.locator(".answer-body").first).to_have_text("One two three four")
    page.check(".answer >> nth=1 >> input[type=radio]")
    press(page, "Continue")
    expect(page.locator(".answer-body").last).to_have_text("One two three four")
    first, second = stub.forks
    assert (first["request_id"], first["index"]) == (second["request_id"], 0)
    assert second["index"] == 1


def test_an_answer_whose_request_is_forgotten_is_continued_from_its_text(page: Page, stub: Stub) -> None:
    stub.script.limit, stub.script.answer = 3, "One two three four five six."
    ask(page, "Count.")
    wait_for_answer(page)
    stub.script.limit, stub.script.answer, stub.script.is_forkable = None, " four.", False
    press(page, "Continue")
    expect(page.locator(".reply .answer-body")).to_have_text("One two three four.")
    assert len(stub.forks) == 1
    assert stub.chats[1]["messages"][-1] == {"role": "assistant", "content": "One two three"}


def test_a_broken_stream_can_be_continued(page: Page, stub: Stub) -> None:
    stub.script.hang_up_after = 3
    ask(page, "Go on.")
    wait_for_answer(page)
    stub.script.hang_up_after, stub.script.answer = None, " capital."
    press(page, "Continue")
    expect(page.locator(".reply .answer-body")).to_have_text("Paris is the capital.")
    expect(page.locator(".problem")).to_have_count(0)


def test_a_branch_at_a_token_forks_the_request_there(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.check("#setting-logprobs")
    ask(page, "Where?")
    wait_for_answer(page)
    stub.script.answer = " was once."
    page.click(".token >> nth=1")
    press(page, "Branch here")
    expect(page.locator(".reply .answer-body")).to_have_text("Paris was once.")
    [fork] = stub.forks
    assert (fork["at_token"], fork["index"], fork["logprobs"]) == (1, 0, 5)
    expect(page.locator(".version")).to_have_text("2 / 2")
    expect(page.locator(".reply .token")).to_have_text([" was", " once", "."])


def test_a_branch_with_another_token_puts_it_into_the_text(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.check("#setting-logprobs")
    ask(page, "Where?")
    wait_for_answer(page)
    stub.script.answer = " big one."
    page.focus(".answer-body")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#token-card button").first).to_be_focused()
    page.get_by_role("button", name="Branch with ·a").click()
    expect(page.locator(".reply .answer-body")).to_have_text("Paris a big one.")
    assert not stub.forks
    assert stub.chats[1]["messages"][-1] == {"role": "assistant", "content": "Paris a"}


def test_a_branch_into_a_new_chat_takes_the_turns_up_to_there(page: Page, stub: Stub) -> None:
    ask(page, "First?")
    wait_for_answer(page)
    ask(page, "Second?")
    expect(page.locator(".reply .facts")).to_have_count(2)
    page.get_by_role("button", name="More", exact=True).first.click()
    page.get_by_role("menuitem", name="Branch into a new chat").click()
    expect(page.locator(".bubble")).to_have_text(["First?"])
    expect(page.locator(".conversation .title")).to_have_text(["First? (branch)", "First?"])
    ask(page, "Other?")
    expect(page.locator(".reply .facts")).to_have_count(2)
    assert contents(stub.chats[2])[0::2] == ["First?", "Other?"]


def test_a_tool_call_is_shown_and_its_result_goes_back_to_the_model(page: Page, stub: Stub) -> None:
    open_settings(page)
    page.fill("#setting-tools", json.dumps(TOOLS))
    expect(page.locator(".chip")).to_have_text("1 tool")
    stub.script.tool_calls = (("get_weather", '{"city": "Paris"}'),)
    ask(page, "Weather?")
    wait_for_answer(page)
    assert (stub.chats[0]["tools"], stub.chats[0]["tool_choice"]) == (TOOLS, "auto")
    expect(page.locator(".tool-call")).to_contain_text("Calls get_weather")
    expect(page.locator(".tool-call pre")).to_contain_text('"city": "Paris"')
    stub.script.tool_calls, stub.script.answer = (), "It is sunny."
    page.get_by_label("Result of get_weather").fill('{"sky": "clear"}')
    press(page, "Send result")
    expect(page.locator(".reply .answer-body").last).to_have_text("It is sunny.")
    question, call, result = stub.chats[1]["messages"]
    assert question["content"] == "Weather?"
    assert call["content"] is None
    assert call["tool_calls"] == [
        {"id": "call-0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    ]
    assert result == {"role": "tool", "tool_call_id": "call-0", "content": '{"sky": "clear"}'}
    expect(page.locator(".tool-results")).to_have_count(0)


def test_copying_a_request_as_curl_takes_the_messages_before_the_answer(page: Page, stub: Stub) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "It's here?")
    wait_for_answer(page)
    choose(page, "More", "Copy as curl")
    expect(page.locator("#message")).to_have_text("Copied as curl.")
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith(f"curl '{stub.url}/v1/chat/completions'")
    assert "It'\\''s here?" in text
    assert "Paris" not in text
