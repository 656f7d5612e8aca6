"""The page against `quire serve` with the default model: nothing scripted. Its pictures are the ones in the docs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from playground_hand import ask, expect, wait_for_answer
from quire.runtime.loading.resolve import resolve_model
from quire.types.errors import QuireError

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parents[2]
ADMIN_KEY = "admin-of-this-test"
SIZES = ["--num-kv-blocks", "96", "--max-num-seqs", "16", "--max-model-len", "512", "--threads", "1"]
Keep = Callable[["Page", str], None]
PATIENCE = 120_000  # milliseconds; a slow machine under load is still right


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server, which must end well when it is told to."""
    try:
        model = resolve_model(None).path
    except QuireError as error:
        pytest.skip(f"the default model is not here: {error}")
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "quire", "serve", str(model), "--served-model-name", "SmolLM2-135M-Instruct"]
    command += ["--port", "0", "--admin-key", ADMIN_KEY, *SIZES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True, env=environment)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if " serves " in line), "")
        address = re.search(r"http://\S+", ready)
        assert address, log.read_text()
        yield address[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_question_is_answered_with_probabilities_and_a_ledger(
    open_page: Callable[..., Page], server: str, keep: Keep
) -> None:
    page = open_page(f"{server}/#admin={ADMIN_KEY}")
    page.set_default_timeout(PATIENCE)
    page.fill("#setting-temperature", "0")
    page.fill("#setting-max_tokens", "80")
    ask(page, "What is the capital of France?")
    wait_for_answer(page)
    expect(page.locator(".reply .answer-body")).to_contain_text("Paris")
    page.click("text=Ledger")
    expect(page.locator(".reply .ledger")).to_contain_text("The first token came.")
    expect(page.locator(".reply .ledger")).to_contain_text("It finished with")
    ask(page, "Write a short Python function that adds two numbers.")
    expect(page.locator(".reply .facts")).to_have_count(2, timeout=PATIENCE)
    page.hover(".reply:last-child .token >> nth=5")
    expect(page.locator("#token-card .alternatives li")).to_have_count(5)
    keep(page, "playground-chat")


def test_load_shows_in_the_block_map_and_leaves_no_block_held(
    open_page: Callable[..., Page], server: str, keep: Keep
) -> None:
    page = open_page(f"{server}/#admin={ADMIN_KEY}", color_scheme="dark")
    page.set_default_timeout(PATIENCE)
    expect(page.locator(".block-map-view .legend")).to_contain_text("held0shared0")
    page.fill("#setting-max_tokens", "60")
    ask(page, "What does a librarian do all day?")
    wait_for_answer(page)
    page.click("text=Load it")
    count = "Number(document.querySelector('.block-map-view .legend li:nth-child(PLACE) b').textContent)"
    free, shared = count.replace("PLACE", "1"), count.replace("PLACE", "4")
    page.wait_for_function(f"() => {shared} > 0")
    page.wait_for_function(f"() => {free} < 40", timeout=PATIENCE)
    page.hover(".block-map", position={"x": 250, "y": 19})
    keep(page, "playground-blocks")
    if page.locator("text=Stop load").count():
        page.click("text=Stop load")
    expect(page.locator(".block-map-view .legend")).to_contain_text("held0shared0", timeout=PATIENCE)


def test_stopping_an_answer_frees_its_blocks(open_page: Callable[..., Page], server: str) -> None:
    page = open_page(f"{server}/#admin={ADMIN_KEY}")
    page.fill("#setting-max_tokens", "400")
    ask(page, "Tell me a very long story about a lighthouse.")
    expect(page.locator(".block-map-view .legend")).not_to_contain_text("held0shared0", timeout=PATIENCE)
    expect(page.locator(".reply .token").nth(3)).to_be_attached(timeout=PATIENCE)
    page.keyboard.press("Escape")
    expect(page.locator(".answer-note")).to_have_text("Stopped.")
    expect(page.locator(".block-map-view .legend")).to_contain_text("held0shared0", timeout=PATIENCE)


def test_two_answers_on_a_phone(open_page: Callable[..., Page], server: str, keep: Keep) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True}
    page = open_page(f"{server}/", **phone)
    page.tap(".views [data-view=settings]")
    page.fill("#setting-n", "2")
    page.fill("#setting-max_tokens", "32")
    page.tap(".views [data-view=chat]")
    ask(page, "Why is the sky blue?")
    page.set_default_timeout(PATIENCE)
    wait_for_answer(page)
    expect(page.locator(".answer")).to_have_count(2)
    page.tap(".reply .token >> nth=6")
    keep(page, "playground-phone")
