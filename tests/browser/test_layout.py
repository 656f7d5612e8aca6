"""Widths, themes, and what assistive technology finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from playground_hand import ask, expect, wait_for_answer
from playground_stub import ADMIN_KEY, Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]
OVERFLOW = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
UNBROKEN = "a" * 400


def test_no_width_scrolls_sideways(admin_page: Page, stub: Stub) -> None:
    page = admin_page
    stub.script.answer = f"{UNBROKEN}\n```\n{UNBROKEN}\n```\n"
    page.fill("#setting-n", "3")
    ask(page, UNBROKEN)
    wait_for_answer(page)
    page.click("text=Ledger")
    for width in (320, 360, 799, 800, 1199, 1200, 1920):
        page.set_viewport_size({"width": width, "height": 740})
        for view in ("engine", "settings", "chat"):
            button = page.locator(f".views [data-view={view}]")
            if button.is_visible():
                button.click()
            sideways = page.locator(".panel:visible").evaluate_all(
                "panels => panels.map(panel => panel.scrollWidth - panel.clientWidth)"
            )
            assert max(sideways) <= 0, (width, view)
            assert page.evaluate(OVERFLOW) <= 0, (width, view)


def test_a_phone_shows_one_panel_at_a_time(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 360, "height": 740}, has_touch=True)
    expect(page.locator(".chat")).to_be_visible()
    expect(page.locator(".engine")).to_be_hidden()
    page.tap(".views [data-view=engine]")
    expect(page.locator(".engine")).to_be_visible()
    expect(page.locator(".chat")).to_be_hidden()
    expect(page.locator(".views [data-view=engine]")).to_have_attribute("aria-pressed", "true")


def test_a_tap_on_a_token_shows_its_card_inside_the_screen(open_page: OpenPage, stub: Stub) -> None:
    page = open_page(f"{stub.url}/", viewport={"width": 360, "height": 740}, has_touch=True)
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
    page.wait_for_selector(".reply.writing .token")
    running = "document.getAnimations().filter(each => each.playState === 'running').length"
    assert page.evaluate(running) == 0
    page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(open_page: OpenPage, stub: Stub, scheme: str) -> None:
    page = open_page(f"{stub.url}/#admin={ADMIN_KEY}", color_scheme=scheme)
    ask(page, "Read this.")
    wait_for_answer(page)
    page.click("text=Ledger")
    assert page.evaluate(CONTRAST) == []


def test_everything_that_can_be_used_has_a_name(admin_page: Page, stub: Stub) -> None:
    ask(admin_page, "Name it.")
    wait_for_answer(admin_page)
    nameless = admin_page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, canvas[tabindex], select")]
          .filter((each) => each.checkVisibility())
          .filter((each) => !(each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length))
          .map((each) => each.outerHTML)"""
    )
    assert nameless == []


def test_focus_can_be_seen_wherever_it_goes(admin_page: Page, stub: Stub) -> None:
    seen = set()
    for _ in range(60):
        admin_page.keyboard.press("Tab")
        outline = admin_page.evaluate(
            """() => {
              const each = document.activeElement;
              const style = getComputedStyle(each);
              const name = each === document.body ? "BODY" : each.id || each.className || each.tagName;
              return [name, style.outlineStyle, parseFloat(style.outlineWidth)];
            }"""
        )
        if outline[0] == "BODY":
            break
        assert outline[1] != "none", outline
        assert outline[2] >= 2, outline
        seen.add(outline[0])
    assert {"prompt", "send", "block-map", "setting-temperature"} <= seen


def test_the_page_needs_no_inline_script_or_style(page: Page, stub: Stub) -> None:
    assert page.locator("[style]").evaluate_all("all => all.filter(e => e.getAttribute('onclick')).length") == 0
    markup = page.request.get(f"{stub.url}/").text()
    assert "style=" not in markup
    assert "<style" not in markup
    assert "javascript:" not in markup


CONTRAST = """() => {
  const luminance = (channels) => {
    const [r, g, b] = channels.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const read = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const [r, g, b, a = 1] = read(getComputedStyle(each).backgroundColor);
      layers.push([r, g, b, a]);
      if (a === 1) break;
    }
    const over = (under, [r, g, b, a]) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
    return layers.reverse().reduce(over, [0, 0, 0]);
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(".visually-hidden, .skip, noscript")) continue;
    const style = getComputedStyle(element);
    const pair = [luminance(read(style.color).slice(0, 3)), luminance(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) poor.push([element.className || element.tagName, element.textContent.slice(0, 20), ratio]);
  }
  return poor;
}"""
