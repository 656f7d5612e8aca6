"""The engine panel: block map, timelines, plots, load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from playground_hand import ask, expect, open_engine
from playground_stub import ADMIN_KEY, Live, Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page


def hold(stub: Stub, name: str, prompt: int, written: int, samples: int = 1, state: str = "running") -> None:
    stub.live[name] = Live(name, prompt, samples, state=state, written=written)


def test_the_block_map_follows_the_stream(admin_page: Page, stub: Stub) -> None:
    legend = admin_page.locator(".block-map-view .legend")
    expect(legend).to_contain_text("free256")
    stub.script.cached, stub.script.swapped = (100, 101, 102), 4
    hold(stub, "alpha", prompt=32, written=16)
    hold(stub, "beta", prompt=16, written=16, samples=3)
    expect(legend).to_contain_text("held6")
    expect(legend).to_contain_text("shared1")
    expect(legend).to_contain_text("cached3")
    expect(legend).to_contain_text("swapped4")
    expect(legend).to_contain_text(f"free{256 - 6 - 1 - 3}")
    stub.live.clear()
    expect(legend).to_contain_text("held0")


def test_pointing_at_a_block_names_its_holders(admin_page: Page, stub: Stub) -> None:
    hold(stub, "alpha", prompt=32, written=16)
    hold(stub, "beta", prompt=16, written=16, samples=3)
    readout = admin_page.locator("#block-readout")
    expect(admin_page.locator(".block-map-view .legend")).to_contain_text("held6")
    admin_page.hover(".block-map", position={"x": 5, "y": 5})
    expect(readout).to_have_text("Block 0, held: alpha (48 tokens)")
    admin_page.hover(".block-map", position={"x": 3 * 14 + 5, "y": 5})
    expect(readout).to_have_text("Block 3, shared by 3 sequences: beta (64 tokens)")


def test_a_tap_on_a_block_names_its_holders(open_page: Callable[..., Page], stub: Stub) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
    page = open_page(f"{stub.url}/#admin={ADMIN_KEY}", **phone)
    hold(stub, "chatcmpl-alpha~12ab34", prompt=32, written=16)
    page.tap(".views [data-view=engine]")
    expect(page.locator(".block-map-view .legend")).to_contain_text("held3")
    page.tap(".block-map", position={"x": 5, "y": 5})
    expect(page.locator("#block-readout")).to_have_text("Block 0, held: alpha (48 tokens)")


def test_the_block_map_is_walked_by_keyboard(admin_page: Page, stub: Stub) -> None:
    hold(stub, "alpha", prompt=32, written=16)
    expect(admin_page.locator(".block-map-view .legend")).to_contain_text("held3")
    admin_page.focus(".section summary >> nth=0")
    admin_page.keyboard.press("Tab")
    readout = admin_page.locator("#block-readout")
    expect(readout).to_have_text("Block 0, held: alpha (48 tokens)")
    for _ in range(3):
        admin_page.keyboard.press("ArrowRight")
    expect(readout).to_have_text("Block 3, free")
    admin_page.keyboard.press("End")
    expect(readout).to_have_text("Block 255, free")


def test_cells_are_painted_in_the_colours_of_their_states(admin_page: Page, stub: Stub) -> None:
    hold(stub, "alpha", prompt=16, written=0)
    expect(admin_page.locator(".block-map-view .legend")).to_contain_text("held1")
    pixels = admin_page.evaluate(
        """() => {
          const context = document.querySelector(".block-map").getContext("2d");
          return [[5, 5], [19, 5]].map(([x, y]) => [...context.getImageData(x, y, 1, 1).data].slice(0, 3));
        }"""
    )
    assert pixels == [[0x56, 0x74, 0xCD], [0xE7, 0xE2, 0xD7]]


def test_tens_of_thousands_of_blocks_fit_into_the_panel(admin_page: Page, stub: Stub) -> None:
    stub.script.num_blocks = 60_000
    hold(stub, "alpha", prompt=16_000, written=0)
    expect(admin_page.locator(".block-map-view .legend")).to_contain_text("held1000")
    expect(admin_page.locator("#block-readout")).to_contain_text("One cell stands for")
    assert admin_page.locator(".block-map").evaluate("canvas => canvas.clientHeight") <= 310


def test_timelines_count_running_waiting_and_preempted(admin_page: Page, stub: Stub) -> None:
    hold(stub, "alpha", 16, 0)
    hold(stub, "beta", 16, 0, state="waiting")
    hold(stub, "gamma", 16, 0, state="preempted")
    hold(stub, "delta", 16, 0, state="preempted")
    timelines = admin_page.get_by_role("img", name="Requests now: 1 running, 1 waiting, 2 preempted")
    expect(timelines).to_be_visible()


def test_a_live_request_can_be_ended(admin_page: Page, stub: Stub) -> None:
    hold(stub, "alpha", 16, 0)
    admin_page.click("role=button[name='End request alpha']")
    expect(admin_page.locator(".engine")).to_contain_text("alpha was ended.")
    assert stub.aborted == ["alpha"]


def test_the_demo_load_asks_for_more_than_the_cache_holds_and_leaves_room_to_chat(admin_page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.1, "word " * 200
    admin_page.click("text=Run demo load")
    timelines = admin_page.locator("details.section", has_text="Requests over time").locator(".legend")
    expect(timelines).to_contain_text("running13")
    [sent] = stub.completions
    cache = stub.script.num_blocks * 16
    tokens = [len(prompt) // 4 + sent["max_tokens"] for prompt in sent["prompt"]]
    assert sum(tokens) > cache
    assert max(tokens) <= 2048
    assert len({prompt[:200] for prompt in sent["prompt"]}) == 1
    assert len(set(sent["prompt"])) == len(sent["prompt"])
    ask(admin_page, "Still there?")
    expect(admin_page.locator(".reply .answer-body")).to_contain_text("word word")
    expect(timelines).to_contain_text("running14")
    admin_page.keyboard.press("Escape")
    admin_page.click("text=Stop demo load")
    expect(admin_page.locator(".load .help")).to_contain_text("Stopped.")
    expect(timelines).to_contain_text("running0")


def test_a_demo_load_that_finishes_says_what_its_requests_met(admin_page: Page, stub: Stub) -> None:
    stub.script.pause = 0.1
    admin_page.click("text=Run demo load")
    expect(admin_page.locator(".load .help")).to_contain_text("Done.")
    met = admin_page.locator(".load-summary")
    expect(met).to_contain_text("Cache: up to")
    expect(met).to_contain_text("Waiting: none")
    expect(met).to_contain_text("Sharing: 78 prompt tokens came from the prefix cache.")
    expect(met).to_contain_text("Preemption: 13 times.")
    expect(met).to_contain_text("Swap: none")
    expect(admin_page.locator(".recent-requests details")).to_have_count(2)
    admin_page.click(".recent-requests summary >> nth=0")
    expect(admin_page.locator(".recent-requests .ledger").first).to_be_visible()


def test_the_summary_of_a_load_tells_waiting_sharing_preemption_and_swap(page: Page) -> None:
    entry = {"amount": 0, "note": ""}
    ledger = [
        {**entry, "kind": "received", "at_ms": 0, "prompt": 0},
        {**entry, "kind": "admitted", "at_ms": 10, "prompt": 0},
        {**entry, "kind": "cached", "at_ms": 10, "amount": 1024, "prompt": 0},
        {
            **entry,
            "kind": "preempted",
            "at_ms": 90,
            "note": "no free blocks; swapped 12 blocks, est. 3 ms",
            "prompt": 0,
        },
        {**entry, "kind": "received", "at_ms": 0, "prompt": 1},
        {**entry, "kind": "admitted", "at_ms": 2500, "prompt": 1},
        {**entry, "kind": "preempted", "at_ms": 2600, "note": "no free blocks; recompute est. 4 ms", "prompt": 1},
    ]
    told = page.evaluate(
        """async ([ledger, peak]) => (await import("/playground/load_summary.js")).summary([{ ledger }], peak)""",
        [ledger, {"used": 0.994, "shared": 7, "waiting": 3, "swapped": 12}],
    )
    assert told == [
        "Cache: up to 99 % of the blocks were held.",
        "Waiting: 1 request waited for blocks or rows, the longest 2.50 s.",
        "Sharing: 1,024 prompt tokens came from the prefix cache. At most 7 blocks had several holders.",
        "Preemption: 2 times.",
        "Swap: 1 preempted request moved to host memory and back.",
    ]


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_model_len", "fills"),
    [
        (96, 16, 512, True),
        (2912, 64, 8192, True),
        (24000, 256, 32768, True),
        (1000000, 1024, 131072, False),  # more tokens than a load may send
        (8, 2, 64, False),  # all rows together never need more
    ],
)
def test_the_demo_load_fits_the_limits_of_a_server(
    page: Page, num_blocks: int, max_num_seqs: int, max_model_len: int, fills: bool
) -> None:
    sizes = {"num_blocks": num_blocks, "block_size": 16, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    plan = page.evaluate(
        """async (sizes) => (await import("/playground/demo_load.js")).planLoad(sizes, { prompts: 256 })""", sizes
    )
    assert plan["prompts"] <= 256
    assert 0 < plan["promptTokens"] + plan["answerTokens"] <= max_model_len
    assert plan["prompts"] * plan["promptTokens"] <= 600_000
    assert plan["fills"] == fills


def test_plots_show_the_speed_of_the_page_without_a_key_and_of_the_server_with_one(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, "word " * 200
    open_engine(page)
    ask(page, "Go.")
    rate = page.locator(".plots figure").first
    expect(rate.locator(".scope")).to_have_text("this page")
    page.wait_for_function("() => Number(document.querySelector('.plots b').textContent) > 5")
    expect(page.locator(".plots figure >> nth=1 >> b")).to_contain_text("ms")
    page.fill("#admin-key", ADMIN_KEY)
    page.press("#admin-key", "Enter")
    expect(rate.locator(".scope")).to_have_text("whole server")


def test_without_a_key_the_panel_says_how_to_get_one(page: Page, stub: Stub) -> None:
    open_engine(page)
    expect(page.locator(".gate")).to_contain_text("quire serve --admin")
    expect(page.locator(".block-map")).to_be_hidden()
    page.fill("#admin-key", "wrong")
    page.press("#admin-key", "Enter")
    expect(page.locator(".gate")).to_contain_text("did not accept this admin key")
    page.fill("#admin-key", ADMIN_KEY)
    page.press("#admin-key", "Enter")
    expect(page.locator(".block-map")).to_be_visible()
    expect(page.locator(".block-map-view .legend")).to_contain_text("free256")
