"""A real Chromium over the scripted server. Every page that a test opens must stay at home and make no complaint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from playground_stub import ADMIN_KEY, Stub

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
EXPECTED_COMPLAINTS = (
    "Failed to load resource",  # Chromium's own line for a refused request; the page has words of its own
    "willReadFrequently",  # these tests read pixels back, the page does not
)

OpenPage = Callable[..., "Page"]


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One per module: while it lives, the main thread counts as running an event loop."""
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine: install the chromium package to run the browser tests")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # milliseconds; a slow machine under load is still right

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub().running() as stub:
        yield stub


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a page in a context of its own; in the end asserts what must hold for every page."""
    contexts, complaints, strangers = [], [], []

    def open_page(url: str, *, wait: bool = True, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        context.set_default_timeout(10_000)
        contexts.append(context)
        home = urlsplit(url).netloc
        page = context.new_page()

        def see(request: Any) -> None:
            if urlsplit(request.url).netloc != home:
                strangers.append(request.url)

        def hear(message: Any) -> None:
            expected = any(words in message.text for words in EXPECTED_COMPLAINTS)
            if message.type in ("error", "warning") and not expected:
                complaints.append(message.text)

        page.on("request", see)
        page.on("console", hear)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        if wait:
            page.wait_for_selector("#status[data-state=ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not strangers, "the page asked somebody else"
    assert not complaints, "the console is not empty"


@pytest.fixture
def page(open_page: OpenPage, stub: Stub) -> Page:
    return open_page(f"{stub.url}/")


@pytest.fixture
def admin_page(open_page: OpenPage, stub: Stub) -> Page:
    return open_page(f"{stub.url}/#admin={ADMIN_KEY}")


@pytest.fixture
def keep() -> Callable[[Page, str], None]:
    """Keeps a picture of the page as test output, under build/screenshots."""

    def keep(page: Page, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return keep
