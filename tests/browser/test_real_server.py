"""The page against `quire serve` with the default model: nothing scripted. Its pictures are the ones in the docs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from playground_hand import ask, expect, open_engine, open_settings, wait_for_answer
from quire.runtime.loading.resolve import resolve_model
from quire.types.errors import QuireError

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parents[2]
ADMIN_KEY = "admin-of-this-test"
SIZES = ["--num-kv-blocks", "96", "--max-num-seqs", "16", "--max-model-len", "512", "--threads", "1"]
TIERS = ["--host-cache-memory", "256MiB", "--preemption", "swap"]
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
    command += ["--port", "0", "--admin-key", ADMIN_KEY, *SIZES, *TIERS]
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
    open_settings(page)
    page.fill("#setting-temperature", "0")
    page.fill("#setting-max_tokens", "80")
    page.check("#setting-logprobs")
    open_engine(page)
    ask(page, "What is the capital of France?")
    wait_for_answer(page)
    expect(page.locator(".reply .answer-body")).to_contain_text("Paris")
    page.get_by_role("button", name="Timing").click()
    expect(page.locator(".reply .ledger")).to_contain_text("The first token came.")
    expect(page.locator(".reply .ledger")).to_contain_text("It finished with")
    ask(page, "Write a short Python function that adds two numbers.")
    expect(page.locator(".reply .facts")).to_have_count(2, timeout=PATIENCE)
    page.hover(".reply:last-child .token >> nth=5")
    expect(page.locator("#token-card .alternatives li")).to_have_count(5)
    keep(page, "playground-chat")


def test_the_demo_load_shows_waiting_sharing_preemption_and_swap(
    open_page: Callable[..., Page], server: str, keep: Keep
) -> None:
    page = open_page(f"{server}/#admin={ADMIN_KEY}", color_scheme="dark")
    page.set_default_timeout(PATIENCE)
    legend = page.locator(".block-map-view .legend")
    expect(legend).to_contain_text("held0shared0")
    open_settings(page)
    page.fill("#setting-max_tokens", "60")
    open_engine(page)
    ask(page, "What does a librarian do all day?")
    wait_for_answer(page)
    page.click("text=Run demo load")
    count = "Number(document.querySelector('.block-map-view .legend li:nth-child(PLACE) b').textContent)"
    page.wait_for_function(f"() => {count.replace('PLACE', '4')} > 0")
    page.wait_for_function(f"() => {count.replace('PLACE', '5')} > 0")  # swapped
    page.get_by_role("img", name=re.compile(r"[1-9]\d* preempted")).wait_for()
    expect(page.locator(".load .help")).to_contain_text(re.compile(r"^[1-9]\d* of 16 answers"), timeout=PATIENCE)
    keep(page, "playground-blocks")
    expect(page.locator(".load .help")).to_contain_text("Done.", timeout=4 * PATIENCE)
    told = page.locator(".load-summary li").all_inner_texts()
    assert [line.partition(":")[0] for line in told] == ["Cache", "Waiting", "Sharing", "Preemption", "Swap"], told
    assert "none" not in " ".join(told), told
    expect(legend).to_contain_text("held0shared0", timeout=PATIENCE)


def test_a_cut_answer_is_continued_and_a_branch_at_a_token_forks_the_request(
    open_page: Callable[..., Page], server: str
) -> None:
    page = open_page(f"{server}/")
    page.set_default_timeout(PATIENCE)
    open_settings(page)
    page.fill("#setting-temperature", "0")
    page.check("#setting-logprobs")
    page.fill("#setting-max_tokens", "24")
    ask(page, "Count from one to twenty in words.")
    wait_for_answer(page)
    whole = page.inner_text(".answer-body")
    page.fill("#setting-max_tokens", "8")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".version")).to_have_text("2 / 2")
    wait_for_answer(page)
    assert whole.startswith(page.inner_text(".answer-body"))
    page.fill("#setting-max_tokens", "16")
    forks = []
    page.on("request", lambda request: forks.append(request.post_data_json) if request.url.endswith("/fork") else None)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer-body")).to_have_text(whole, use_inner_text=True)
    wait_for_answer(page)
    assert len(forks) == 1
    page.click(".token >> nth=3")
    page.get_by_role("button", name="Branch here").click()
    expect(page.locator(".version")).to_have_text("3 / 3")
    wait_for_answer(page)
    assert forks[1]["at_token"] == 3
    assert page.locator(".problem").count() == 0


def test_a_schema_shapes_the_answer_and_a_tool_is_called(open_page: Callable[..., Page], server: str) -> None:
    page = open_page(f"{server}/")
    page.set_default_timeout(PATIENCE)
    open_settings(page)
    page.fill("#setting-temperature", "0")
    page.fill("#setting-max_tokens", "120")
    page.select_option("#setting-format", "json_schema")
    page.locator("text=Insert an example").first.click()
    ask(page, "Paris, the capital of France, as JSON.")
    wait_for_answer(page)
    assert set(json.loads(page.inner_text(".answer-body pre"))) == {"city", "population"}
    page.select_option("#setting-format", "text")
    page.locator("text=Insert an example").last.click()
    page.select_option("#setting-tool_choice", "required")
    ask(page, "What is the weather in Paris?")
    expect(page.locator(".tool-call")).to_contain_text("get_weather", timeout=PATIENCE)
    expect(page.locator(".problem")).to_have_count(0)


def test_stopping_an_answer_frees_its_blocks(open_page: Callable[..., Page], server: str) -> None:
    page = open_page(f"{server}/#admin={ADMIN_KEY}")
    open_settings(page)
    page.fill("#setting-max_tokens", "400")
    open_engine(page)
    ask(page, "Tell me a very long story about a lighthouse.")
    expect(page.locator(".block-map-view .legend")).not_to_contain_text("held0shared0", timeout=PATIENCE)
    expect(page.locator(".reply .answer-body")).not_to_be_empty(timeout=PATIENCE)
    page.keyboard.press("Escape")
    expect(page.locator(".answer-note")).to_have_text("Stopped.")
    expect(page.locator(".block-map-view .legend")).to_contain_text("held0shared0", timeout=PATIENCE)


def test_two_answers_on_a_phone(open_page: Callable[..., Page], server: str, keep: Keep) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True}
    page = open_page(f"{server}/", **phone)
    page.tap(".views [data-view=settings]")
    page.fill("#setting-n", "2")
    page.fill("#setting-max_tokens", "32")
    open_settings(page)
    page.check("#setting-logprobs")
    page.tap(".views [data-view=chat]")
    ask(page, "Why is the sky blue?")
    page.set_default_timeout(PATIENCE)
    wait_for_answer(page)
    expect(page.locator(".answer")).to_have_count(2)
    page.tap(".reply .token >> nth=6")
    keep(page, "playground-phone")
