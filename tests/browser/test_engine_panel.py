"""The engine panel: block map, timelines, plots, load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from playground_hand import ask, expect
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
    admin_page.focus(".load button")
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


def test_load_it_fills_the_cache_and_leaves_room_to_chat(admin_page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.1, "word " * 200
    admin_page.click("text=Load it")
    legend = admin_page.locator(".engine section >> nth=1 >> .legend")
    expect(legend).to_contain_text("running10")
    ask(admin_page, "Still there?")
    expect(admin_page.locator(".reply .answer-body")).to_contain_text("word word")
    expect(legend).to_contain_text("running11")
    admin_page.keyboard.press("Escape")
    admin_page.click("text=Stop load")
    expect(admin_page.locator(".load .help")).to_contain_text("Stopped.")
    expect(legend).to_contain_text("running0")


def test_load_that_finishes_says_so_and_lists_its_ledgers(page: Page, stub: Stub) -> None:
    page.click("text=Load it")
    expect(page.locator(".load .help")).to_contain_text("All 15 answers came.")
    expect(page.locator(".recent-requests details")).to_have_count(3)
    page.click(".recent-requests summary >> nth=0")
    expect(page.locator(".recent-requests .ledger").first).to_be_visible()


def test_plots_show_the_speed_of_the_page_without_a_key_and_of_the_server_with_one(page: Page, stub: Stub) -> None:
    stub.script.pause, stub.script.answer = 0.05, "word " * 200
    ask(page, "Go.")
    rate = page.locator(".plots figure").first
    expect(rate.locator(".scope")).to_have_text("this page")
    page.wait_for_function("() => Number(document.querySelector('.plots b').textContent) > 5")
    expect(page.locator(".plots figure >> nth=1 >> b")).to_contain_text("ms")
    page.fill("#admin-key", ADMIN_KEY)
    page.press("#admin-key", "Enter")
    expect(rate.locator(".scope")).to_have_text("whole server")


def test_without_a_key_the_panel_says_how_to_get_one(page: Page, stub: Stub) -> None:
    expect(page.locator(".gate")).to_contain_text("quire serve --admin")
    expect(page.locator(".block-map")).to_be_hidden()
    page.fill("#admin-key", "wrong")
    page.press("#admin-key", "Enter")
    expect(page.locator(".gate")).to_contain_text("did not accept this admin key")
    page.fill("#admin-key", ADMIN_KEY)
    page.press("#admin-key", "Enter")
    expect(page.locator(".block-map")).to_be_visible()
    expect(page.locator(".block-map-view .legend")).to_contain_text("free256")
