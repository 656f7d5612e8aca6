"""What a hand does on the playground's page. Whoever imports this is skipped where Playwright is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
