"""Widths, panels and themes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from playground_hand import ask, expect, open_settings, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]
OVERFLOW = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
UNBROKEN = "a" * 400


def test_no_width_scrolls_sideways(admin_page: Page, stub: Stub) -> None:
    page = admin_page
    wide_row = "|".join(["cell"] * 30)
    stub.script.answer = (
        f"{UNBROKEN}\n```\n{UNBROKEN}\n```\n{wide_row}\n{'|'.join(['-'] * 30)}\n{wide_row}\n- `{UNBROKEN}`"
    )
    open_settings(page)
    page.fill("#setting-n", "3")
    ask(page, UNBROKEN)
    wait_for_answer(page)
    page.get_by_role("button", name="Timing").click()
    for width in (320, 360, 799, 800, 1199, 1200, 1920):
        page.set_viewport_size({"width": width, "height": 740})
        for view in ("engine", "settings", "history", "chat"):
            show(page, view)
            sideways = page.locator(".panel:visible").evaluate_all(
                "panels => panels.map(panel => panel.scrollWidth - panel.clientWidth)"
            )
            assert max(sideways) <= 0, (width, view)
            assert page.evaluate(OVERFLOW) <= 0, (width, view)


def show(page: Page, view: str) -> None:
    """Makes a panel visible, by whatever the screen has for it."""
    toggle = page.locator(f"[data-toggle={'sidebar' if view == 'history' else view}]")
    if page.locator(".views").is_visible():
        page.click(f".views [data-view={view}]")
    elif view != "chat" and toggle.get_attribute("aria-expanded") == "false":
        toggle.click()


def test_a_phone_shows_one_panel_at_a_time(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 360, "height": 740}, has_touch=True)
    panels = {"chat": ".chat", "history": ".sidebar", "settings": ".settings", "engine": ".engine"}
    expect(page.locator(".chat")).to_be_visible()
    for view in ("history", "settings", "engine", "chat"):
        page.tap(f".views [data-view={view}]")
        expect(page.locator(f".views [data-view={view}]")).to_have_attribute("aria-pressed", "true")
        for name, panel in panels.items():
            assert page.locator(panel).is_visible() == (name == view), (view, name)


def test_on_a_phone_a_chat_that_is_opened_takes_the_place_of_the_list(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 360, "height": 740}, has_touch=True)
    ask(page, "First")
    wait_for_answer(page)
    page.tap(".views [data-view=history]")
    page.tap(".new-chat")
    expect(page.locator(".welcome")).to_be_visible()
    page.tap(".views [data-view=history]")
    page.tap(".conversation")
    expect(page.locator(".question .bubble")).to_have_text("First")


def test_a_chat_is_edited_renamed_found_and_deleted_by_touch(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.fill("#prompt", "First")
    page.tap("#send")
    wait_for_answer(page)
    page.tap("role=button[name='Edit message']")
    page.fill("role=textbox[name='Edit the message']", "First, edited")
    page.tap(".editor .primary")
    expect(page.locator(".version")).to_have_text("2 / 2")
    page.tap("role=button[name='Previous version']")
    expect(page.locator(".bubble")).to_have_text("First")
    page.tap(".views [data-view=history]")
    page.tap("role=button[name='Options for First']")
    page.tap("role=menuitem[name='Rename']")
    page.fill("role=textbox[name='New name']", "Renamed")
    page.press("role=textbox[name='New name']", "Enter")
    page.fill("#search", "edited")
    expect(page.locator(".conversation .title")).to_have_text("Renamed")
    page.tap("role=button[name='Options for Renamed']")
    page.tap("role=menuitem[name='Delete']")
    expect(page.locator(".conversation")).to_have_count(0)
    page.tap("role=button[name='Undo']")
    page.tap(".views [data-view=history]")
    expect(page.locator(".conversation .title")).to_have_text("Renamed")


def test_panels_collapse_and_stay_as_they_were_left(page: Page, stub: Stub) -> None:
    expect(page.locator(".sidebar")).to_be_visible()
    expect(page.locator(".settings")).to_be_hidden()
    expect(page.locator(".engine")).to_be_hidden()
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.click("text=Sampling")
    page.reload()
    expect(page.locator(".sidebar")).to_be_hidden()
    expect(page.locator(".settings")).to_be_visible()
    expect(page.get_by_role("button", name="Settings", exact=True)).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#setting-temperature")).to_be_hidden()
    page.get_by_role("button", name="Engine").click()
    expect(page.locator(".settings")).to_be_hidden()
    expect(page.locator(".engine")).to_be_visible()
    page.get_by_role("button", name="Engine").click()
    expect(page.locator(".engine")).to_be_hidden()


def test_a_narrow_screen_shows_one_panel_beside_the_chat(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 900, "height": 700})
    expect(page.locator(".sidebar")).to_be_hidden()
    page.get_by_role("button", name="History").click()
    expect(page.locator(".sidebar")).to_be_visible()
    page.get_by_role("button", name="Engine").click()
    expect(page.locator(".sidebar")).to_be_hidden()
    expect(page.locator(".engine")).to_be_visible()
    expect(page.locator(".chat")).to_be_visible()


def test_a_tap_on_a_token_shows_its_card_inside_the_screen(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 360, "height": 740}, has_touch=True)
    open_settings(page)
    page.check("#setting-logprobs")
    page.tap(".views [data-view=chat]")
    ask(page, "Where?")
    wait_for_answer(page)
    page.tap(".token >> nth=5")
    box = page.locator("#token-card").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(open_page: OpenPage, stub: Stub, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    page = open_page(f"{stub.url}/", color_scheme=scheme)
    theme, background = "document.documentElement.dataset.theme", "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(theme) == scheme
    before = page.evaluate(background)
    page.click("[data-theme-toggle]")
    assert page.evaluate(theme) == other
    assert page.evaluate(background) != before
    page.reload()
    assert page.evaluate(theme) == other


def test_the_block_map_changes_its_colours_with_the_theme(admin_page: Page, stub: Stub) -> None:
    expect(admin_page.locator(".block-map-view .legend")).to_contain_text("free256")
    pixel = "[...document.querySelector('.block-map').getContext('2d').getImageData(5, 5, 1, 1).data].join()"
    before = admin_page.evaluate(pixel)
    admin_page.click("[data-theme-toggle]")
    admin_page.wait_for_function(f"before => {pixel} !== before", arg=before)


def test_reduced_motion_stops_the_animations(open_page: OpenPage, stub: Stub) -> None:
    stub.script.pause = 0.2
    page = open_page(f"{stub.url}/", reduced_motion="reduce")
    ask(page, "Calmly.")
    page.wait_for_selector(".reply.writing .answer-body p")
    running = "document.getAnimations().filter(each => each.playState === 'running').length"
    assert page.evaluate(running) == 0
    page.keyboard.press("Escape")


def test_the_page_needs_no_inline_script_or_style(page: Page, stub: Stub) -> None:
    assert page.locator("[style]").evaluate_all("all => all.filter(e => e.getAttribute('onclick')).length") == 0
    markup = page.request.get(f"{stub.url}/").text()
    assert "style=" not in markup
    assert "<style" not in markup
    assert "javascript:" not in markup
