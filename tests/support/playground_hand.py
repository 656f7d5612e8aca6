"""What a hand does on the playground's page. Whoever imports this is skipped where Playwright is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

PLAYWRIGHT = "needs the playwright package; it drives the Chromium of the system, its own browsers are not used"
expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_answer(page: Page) -> None:
    page.wait_for_selector(".reply:last-child .turn-foot .buttons")


def open_settings(page: Page) -> None:
    """Shows the settings panel with all of its groups open."""
    if page.locator("#settings").is_hidden():
        page.locator("[data-toggle=settings], .views [data-view=settings]").locator("visible=true").click()
    page.locator("details.group").evaluate_all("groups => groups.forEach(group => group.open = true)")


def open_engine(page: Page) -> None:
    if page.locator("#engine").is_hidden():
        page.locator("[data-toggle=engine], .views [data-view=engine]").locator("visible=true").click()


def choose(page: Page, button: str, item: str) -> None:
    """Opens the menu of the last button of this name and takes one of its items."""
    page.get_by_role("button", name=button, exact=True).last.click()
    page.get_by_role("menuitem", name=item).click()


def conversation(page: Page) -> dict[str, Any]:
    """The conversation that is open, as the browser keeps it."""
    kept: dict[str, Any] = page.evaluate(
        "JSON.parse(localStorage['quire.conversation.' + sessionStorage['quire.open']])"
    )
    return kept
