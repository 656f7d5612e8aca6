"""What assistive technology and the keyboard find: axe-core's rules, names, focus, and what is announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from playground_hand import ask, expect, open_settings, wait_for_answer
from playground_stub import ADMIN_KEY, Live, Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()  # axe-core, MPL 2.0; used by these tests only
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
ANSWER = """# Rivers

Some **bold** text with `code` and a [link](https://example.org).

| river | km |
|---|--:|
| Rhine | 1230 |

- [x] one
- two

```python
def f(x):  # comment
    return "text" + 12
```
"""
PHONE: dict[str, Any] = {"viewport": {"width": 375, "height": 760}, "has_touch": True}


def violations(page: Page) -> list[str]:
    page.evaluate(AXE)
    found = page.evaluate("rules => axe.run(document, rules)", RULES)
    return [f"{each['id']}: {node['html'][:160]}" for each in found["violations"] for node in each["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_a_wide_screen(open_page: OpenPage, stub: Stub, scheme: str) -> None:
    stub.script.answer = ANSWER
    stub.live["alpha"] = Live("alpha", 32, 2, written=8)
    page = open_page(f"{stub.url}/#admin={ADMIN_KEY}", color_scheme=scheme)
    assert violations(page) == []
    ask(page, "Show everything.")
    wait_for_answer(page)
    page.get_by_role("button", name="Timing").click()
    assert violations(page) == []
    open_settings(page)
    page.select_option("#setting-format", "json_schema")
    assert violations(page) == []
    page.check("#setting-logprobs")
    page.check("#setting-tint")
    page.get_by_role("button", name="Reset all settings").click()
    page.check("#setting-logprobs")
    page.check("#setting-tint")
    page.fill("#setting-n", "2")
    ask(page, "Again, twice.")
    expect(page.locator(".reply .facts")).to_have_count(2)
    page.click(".reply:last-child .token >> nth=3")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="More", exact=True).last.click()
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_a_phone(open_page: OpenPage, stub: Stub, scheme: str) -> None:
    stub.script.answer = ANSWER
    page = open_page(f"{stub.url}/#admin={ADMIN_KEY}", color_scheme=scheme, **PHONE)
    ask(page, "Show everything.")
    wait_for_answer(page)
    for view in ("chat", "history", "settings", "engine"):
        page.tap(f".views [data-view={view}]")
        assert violations(page) == [], view


def test_axe_finds_nothing_when_something_is_wrong(open_page: OpenPage, stub: Stub) -> None:
    stub.script.api_key = "needed"
    page = open_page(f"{stub.url}/", wait=False)
    expect(page.locator("#notice")).to_contain_text("API key")
    assert violations(page) == []
    stub.script.api_key = None
    stub.script.refuse = (400, "max_tokens must be at most 2048", {})
    ask(page, "Much.")
    expect(page.locator(".problem")).to_be_visible()
    assert violations(page) == []


def test_the_page_has_its_landmarks_under_plain_names(admin_page: Page) -> None:
    for role, name in (
        ("banner", None),
        ("navigation", "History"),
        ("main", None),
        ("region", "Chat"),
        ("region", "Engine"),
        ("log", "Conversation"),
    ):
        options = {} if name is None else {"name": name}
        expect(admin_page.get_by_role(role, **options)).to_have_count(1)  # type: ignore[arg-type]


def test_a_finished_answer_is_announced_once_and_while_written_it_is_busy(page: Page, stub: Stub) -> None:
    stub.script.pause = 0.1
    ask(page, "Say it.")
    expect(page.locator(".reply")).to_have_attribute("aria-busy", "true")
    announcer = page.locator("#announcer")
    assert announcer.inner_text() == ""
    wait_for_answer(page)
    expect(announcer).to_have_text("The answer is complete. Paris is the capital of France.")
    assert announcer.get_attribute("role") == "status"
    assert page.locator(".reply").get_attribute("aria-busy") is None
    assert page.locator("#thread").get_attribute("aria-live") == "off"


FOCUSED = """() => {
  const each = document.activeElement;
  if (each === document.body) return null;
  const shown = each.id === "prompt" ? each.closest(".composer-box") : each;
  const { outlineStyle, outlineWidth } = getComputedStyle(shown);
  const panel = each.closest(".skip, .topbar, .sidebar, .thread, .composer, .engine");
  return { panel: [...panel.classList].at(-1), visible: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2 };
}"""


def test_focus_goes_through_the_page_in_reading_order_and_can_always_be_seen(admin_page: Page, stub: Stub) -> None:
    ask(admin_page, "Focus.")
    wait_for_answer(admin_page)
    admin_page.reload()
    admin_page.wait_for_selector(".reply")
    order: list[str] = []
    for _ in range(80):
        admin_page.keyboard.press("Tab")
        focused = admin_page.evaluate(FOCUSED)
        if focused is None:
            break
        assert focused["visible"], (order, admin_page.evaluate("document.activeElement.outerHTML"))
        if order[-1:] != [focused["panel"]]:
            order.append(focused["panel"])
    assert order == ["skip", "topbar", "sidebar", "thread", "composer", "engine"]


def test_a_menu_is_used_by_keyboard_and_gives_focus_back(page: Page, stub: Stub) -> None:
    ask(page, "Menu.")
    wait_for_answer(page)
    more = page.get_by_role("button", name="More", exact=True)
    more.focus()
    page.keyboard.press("Enter")
    expect(more).to_have_attribute("aria-expanded", "true")
    items = page.get_by_role("menuitem")
    expect(items.nth(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(items.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(items.last).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(items.nth(0)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(more).to_be_focused()
    expect(more).to_have_attribute("aria-expanded", "false")


def tab_to(page: Page, name: str) -> None:
    """Presses Tab until the element of this name has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "(({ ariaLabel, textContent, id }) => [ariaLabel, textContent, id])(document.activeElement)"
        )
        if name in focused:
            return
    raise AssertionError(f"Tab never came to {name}")


def test_chats_are_opened_branched_and_renamed_by_keyboard_alone(page: Page, stub: Stub) -> None:
    tab_to(page, "Skip to the message box")
    page.keyboard.press("Enter")
    page.keyboard.type("First")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    page.focus("#thread")
    tab_to(page, "Edit message")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.type(" and second")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".version")).to_have_text("2 / 2")
    wait_for_answer(page)
    page.focus(".topbar button")
    tab_to(page, "New chat")
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.focus(".new-chat")
    tab_to(page, "First and secondToday")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text("First and second")
    page.focus(".new-chat")
    tab_to(page, "Options for First and second")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")  # Rename is the first item
    page.keyboard.type("By hand")
    page.keyboard.press("Enter")
    expect(page.locator(".conversation .title")).to_have_text("By hand")
    expect(page.locator(".conversation")).to_be_focused()


def test_everything_a_finger_uses_on_a_phone_is_large_enough(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/#admin={ADMIN_KEY}", **PHONE)
    ask(page, "Tap.")
    wait_for_answer(page)
    for view in ("chat", "history", "settings", "engine"):
        page.tap(f".views [data-view={view}]")
        small = page.locator(
            "button:visible, select:visible, input[type=number]:visible, summary:visible"
        ).evaluate_all(
            """all => all.map((each) => [each.textContent || each.id || each.ariaLabel, each.getBoundingClientRect()])
              .filter(([, box]) => box.width < 24 || box.height < 24).map(([name]) => name)"""
        )
        assert small == [], view
