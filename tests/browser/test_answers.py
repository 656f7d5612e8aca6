"""What an answer looks like: several side by side, probabilities under the pointer, hostile text as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground_hand import ask, expect, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    '"><svg onload=document.title=1>',
    "[a](javascript:document.title='owned')",
    "&lt;b&gt; stays &amp; so does \u202e this",
]


def test_three_answers_stand_side_by_side_and_one_goes_on(page: Page, stub: Stub) -> None:
    page.fill("#setting-n", "3")
    ask(page, "Choose.")
    wait_for_answer(page)
    answers = page.locator(".answer")
    expect(answers).to_have_count(3)
    boxes = [answers.nth(i).bounding_box() for i in range(3)]
    assert len({round(box["y"]) for box in boxes if box}) == 1
    assert stub.chats[0]["n"] == 3
    page.check(".answer >> nth=2 >> input[type=radio]")
    stub.script.answer = "Next."
    page.fill("#setting-n", "1")
    ask(page, "And then?")
    expect(page.locator(".answer")).to_have_count(4)
    assert page.evaluate("JSON.parse(localStorage['quire.conversation'])[1].chosen") == 2


def test_a_token_under_the_pointer_shows_its_probability_and_the_alternatives(page: Page, stub: Stub) -> None:
    ask(page, "Where?")
    wait_for_answer(page)
    page.hover(".token >> nth=1")
    card = page.locator("#token-card")
    expect(card).to_be_visible()
    expect(card.locator(".token-line")).to_contain_text("·is")
    expect(card.locator(".token-line")).to_contain_text("42 %")
    expect(card.locator(".alternatives li")).to_have_count(4)
    expect(card.locator(".alternatives .chosen")).to_contain_text("·is")
    page.hover("#send")
    expect(card).to_be_hidden()


def test_tokens_are_tinted_by_how_unlikely_they_were(page: Page, stub: Stub) -> None:
    ask(page, "Where?")
    wait_for_answer(page)
    classes = page.locator(".token").evaluate_all("all => all.map(each => each.className)")
    assert classes == [
        "token",  # 93 %
        "token surprise-2",  # 42 %
        "token",
        "token",
        "token surprise-1",  # 12 %
        "token",
        "token surprise-0",  # 3 %
    ]
    tint = "getComputedStyle(document.querySelector('.surprise-0')).backgroundColor"
    tinted = page.evaluate(tint)
    page.uncheck("#setting-tint")
    assert page.evaluate(tint) != tinted


def test_the_arrow_keys_walk_through_the_tokens(page: Page, stub: Stub) -> None:
    ask(page, "Where?")
    wait_for_answer(page)
    page.focus(".answer-body")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-card .token-line")).to_contain_text("Paris")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-card .token-line")).to_contain_text("·is")
    page.keyboard.press("End")
    expect(page.locator("#token-card .token-line")).to_contain_text("3.0 %")
    page.keyboard.press("Escape")
    expect(page.locator("#token-card")).to_be_hidden()


def test_probabilities_are_not_asked_for_when_the_switch_is_off(page: Page, stub: Stub) -> None:
    page.uncheck("#setting-logprobs")
    ask(page, "Where?")
    wait_for_answer(page)
    assert "logprobs" not in stub.chats[0]
    assert page.locator(".token").count() == 0
    assert page.inner_text(".reply .answer-body") == stub.script.answer


def test_markup_in_question_and_answer_is_shown_as_text(page: Page, stub: Stub) -> None:
    for text in HOSTILE:
        stub.script.answer = text
        ask(page, text)
        wait_for_answer(page)
    said = "all => all.map(each => each.textContent)"
    assert page.locator(".reply .answer-body").evaluate_all(said) == HOSTILE
    assert page.locator(".question .prose").evaluate_all(said) == HOSTILE
    assert page.locator(".thread img, .thread svg, .thread script, .thread a").count() == 0
    assert page.title() == "Quire playground"


def test_fenced_code_becomes_a_block_and_keeps_its_characters(page: Page, stub: Stub) -> None:
    stub.script.answer = "Like this:\n```python\nif a < b:\n    print('`')\n```\nDone ``` not a fence."
    ask(page, "Show code.")
    wait_for_answer(page)
    block = page.locator(".answer-body pre")
    expect(block).to_have_count(1)
    assert block.get_attribute("data-language") == "python"
    assert block.evaluate("pre => pre.textContent") == "if a < b:\n    print('`')\n"
    expect(page.locator(".answer-body .prose").last).to_have_text("Done ``` not a fence.")


def test_characters_split_over_tokens_come_out_whole(page: Page) -> None:
    pieces = page.evaluate(
        """async () => {
          const { Aligner } = await import("/playground/tokens.js");
          const aligner = new Aligner();
          const entry = (bytes, token) => ({ token, bytes, logprob: 0, top_logprobs: [] });
          return [
            aligner.take("", [entry([0xf0, 0x9f], "\\ufffd")]),
            aligner.take("\\u{1F426} sings", [entry([0x90, 0xa6], "\\ufffd"), entry(null, " sings")]),
            aligner.take("!", [entry(null, "<|end|>"), entry(null, "!")]),
            aligner.take("late", []),
          ].map((pieces) => pieces.map((piece) => [piece.text, piece.token !== null]));
        }"""
    )
    assert pieces == [[], [["\U0001f426", True], [" sings", True]], [["!", True]], [["late", False]]]
