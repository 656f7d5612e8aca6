"""Several conversations: kept, found, renamed, exported, imported and deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from playground_hand import ask, choose, conversation, expect, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page


def start_chats(page: Page, *questions: str) -> None:
    for question in questions:
        page.get_by_role("button", name="New chat").click()
        ask(page, question)
        wait_for_answer(page)


def titles(page: Page) -> list[str]:
    return page.locator(".conversation .title").all_inner_texts()


def test_conversations_are_listed_newest_first_and_survive_a_reload(page: Page, stub: Stub) -> None:
    start_chats(page, "About rivers", "About bread\nand salt")
    assert titles(page) == ["About bread", "About rivers"]
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    expect(page.locator(".bubble")).to_have_text("About bread\nand salt")
    page.get_by_role("button", name="About rivers", exact=False).first.click()
    expect(page.locator(".bubble")).to_have_text("About rivers")
    expect(page.locator(".conversation[aria-current=true] .title")).to_have_text("About rivers")
    ask(page, "More")
    expect(page.locator(".reply .facts")).to_have_count(2)
    assert [message["content"] for message in stub.chats[-1]["messages"]][0::2] == ["About rivers", "More"]
    assert titles(page) == ["About rivers", "About bread"]


def test_a_new_chat_is_kept_only_when_something_was_asked(page: Page, stub: Stub) -> None:
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="New chat").click()
    assert titles(page) == []
    expect(page.locator("#prompt")).to_be_focused()


def test_search_finds_titles_questions_and_answers(page: Page, stub: Stub) -> None:
    stub.script.answer = "The Danube flows into the Black Sea."
    start_chats(page, "Where to?")
    stub.script.answer = "Flour, water, salt."
    start_chats(page, "What is in bread?")
    page.fill("#search", "DANUBE")
    assert titles(page) == ["Where to?"]
    expect(page.locator(".conversation .note")).to_contain_text("The Danube flows")
    page.fill("#search", "bread")
    assert titles(page) == ["What is in bread?"]
    page.fill("#search", "nowhere")
    expect(page.locator(".sidebar [role=status]")).to_have_text("No chat holds this text.")
    page.fill("#search", "")
    assert len(titles(page)) == 2


def test_a_chat_is_renamed_in_place_and_escape_leaves_its_name(page: Page, stub: Stub) -> None:
    start_chats(page, "First words")
    choose(page, "Options for First words", "Rename")
    expect(page.get_by_label("New name")).to_be_focused()
    page.keyboard.type("Rivers")
    page.keyboard.press("Enter")
    expect(page.locator(".conversation .title")).to_have_text("Rivers")
    expect(page.locator(".conversation")).to_be_focused()
    choose(page, "Options for Rivers", "Rename")
    page.keyboard.type("Mountains")
    page.keyboard.press("Escape")
    expect(page.locator(".conversation .title")).to_have_text("Rivers")
    page.reload()
    expect(page.locator(".conversation .title")).to_have_text("Rivers")


def test_a_deleted_chat_is_gone_until_undo(page: Page, stub: Stub) -> None:
    start_chats(page, "Keep me", "Delete me")
    choose(page, "Options for Delete me", "Delete")
    expect(page.locator(".welcome")).to_be_visible()
    assert titles(page) == ["Keep me"]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".bubble")).to_have_text("Delete me")
    choose(page, "Options for Delete me", "Delete")
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert titles(page) == ["Keep me"]
    assert page.evaluate("Object.keys(localStorage).filter(key => key.startsWith('quire.conversation.')).length") == 1


def test_a_chat_deleted_while_its_answer_is_written_ends_the_request(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, "word " * 200
    ask(page, "Long")
    expect(page.locator(".reply .answer-body")).to_contain_text("word word")
    choose(page, "Options for Long", "Delete")
    page.wait_for_function("() => document.querySelectorAll('.conversation').length === 0")
    expect(page.locator("#send")).to_have_accessible_name("Send")
    for _ in range(100):
        if stub.hung_up:
            break
        page.wait_for_timeout(50)
    assert stub.hung_up
    assert titles(page) == []


def test_an_answer_goes_on_while_another_chat_is_open(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, "word " * 40 + "end."
    ask(page, "Slow")
    expect(page.locator(".reply .answer-body")).to_contain_text("word word")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#send")).to_have_accessible_name("Send")
    stub.script.answer = "Quick."
    ask(page, "Fast")
    expect(page.locator(".reply .answer-body")).to_have_text("Quick.")
    page.click(".conversation:has-text('Slow')")
    expect(page.locator(".reply .answer-body")).to_contain_text("end.")
    wait_for_answer(page)
    assert conversation(page)["turns"][1]["answers"][0]["text"].endswith("end.")


def test_exports_hold_the_chat_and_a_json_export_is_imported_again(page: Page, stub: Stub, tmp_path: Path) -> None:
    stub.script.answer = "**Bold** answer."
    start_chats(page, "Export: me?")
    with page.expect_download() as markdown:
        choose(page, "Options for Export: me?", "Export as Markdown")
    assert markdown.value.suggested_filename == "Export-me.md"
    text = Path(markdown.value.path()).read_text()
    assert text == "# Export: me?\n\n## You\n\nExport: me?\n\n## Assistant\n\n**Bold** answer.\n"
    with page.expect_download() as exported:
        page.click("text=Export all")
    file = tmp_path / "chats.json"
    exported.value.save_as(file)
    assert [each["turns"][0]["text"] for each in json.loads(file.read_text())["conversations"]] == ["Export: me?"]
    choose(page, "Options for Export: me?", "Delete")
    page.set_input_files("input[type=file]", file)
    expect(page.locator("#message")).to_have_text("One chat was imported.")
    page.click(".conversation")
    expect(page.locator(".reply strong")).to_have_text("Bold")


def test_a_file_that_holds_no_chat_is_refused_in_words(page: Page, tmp_path: Path) -> None:
    for name, content in {
        "text.json": "{oops",
        "list.json": "[1, 2]",
        "other.json": '{"conversations": [{"id": 3}]}',
    }.items():
        file = tmp_path / name
        file.write_text(content)
        page.set_input_files("input[type=file]", file)
        expect(page.locator("#message")).to_contain_text(f"{name} was not imported:")
    assert titles(page) == []


def test_a_chat_kept_by_another_tab_appears_in_this_one(open_page: Callable[..., Page], stub: Stub) -> None:
    page = open_page(f"{stub.url}/")
    other = page.context.new_page()
    other.goto(f"{stub.url}/")
    other.wait_for_selector("#status[data-state=ready]")
    ask(other, "From elsewhere")
    wait_for_answer(other)
    expect(page.locator(".conversation .title")).to_have_text("From elsewhere")


def test_full_storage_is_told_and_the_chat_goes_on(page: Page, stub: Stub) -> None:
    page.evaluate("localStorage.setItem('filler', 'x'.repeat(5 * 1024 * 1024 - 2000))")
    stub.script.answer = "long answer " * 400
    ask(page, "Fill it")
    wait_for_answer(page)
    expect(page.locator("#message")).to_contain_text("storage is full")
    ask(page, "Still there?")
    expect(page.locator(".reply .facts")).to_have_count(2)
