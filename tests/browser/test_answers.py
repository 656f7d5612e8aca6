"""What an answer looks like: several side by side, and the probabilities of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground_hand import ask, conversation, expect, open_settings, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page


def ask_with_probabilities(page: Page, text: str) -> None:
    open_settings(page)
    page.check("#setting-logprobs")
    ask(page, text)
    wait_for_answer(page)


def test_three_answers_stand_side_by_side_and_the_chosen_one_is_sent_on(page: Page, stub: Stub) -> None:
    open_settings(page)
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
    assert conversation(page)["turns"][1]["chosen"] == 2


def test_a_token_under_the_pointer_shows_its_probability_and_the_alternatives(page: Page, stub: Stub) -> None:
    ask_with_probabilities(page, "Where?")
    page.hover(".token >> nth=1")
    card = page.locator("#token-card")
    expect(card).to_be_visible()
    expect(card.locator(".token-line")).to_contain_text("·is")
    expect(card.locator(".token-line")).to_contain_text("42 %")
    expect(card.locator(".alternatives li")).to_have_count(4)
    expect(card.locator(".alternatives .chosen")).to_contain_text("·is")
    page.hover("#send")
    expect(card).to_be_hidden()


def test_probabilities_and_their_tint_are_off_until_they_are_asked_for(page: Page, stub: Stub) -> None:
    ask(page, "Where?")
    wait_for_answer(page)
    assert "logprobs" not in stub.chats[0]
    assert page.locator(".token").count() == 0
    assert page.inner_text(".reply .answer-body") == stub.script.answer
    ask_with_probabilities(page, "Where?")
    assert (stub.chats[1]["logprobs"], stub.chats[1]["top_logprobs"]) == (True, 5)
    tint = "getComputedStyle(document.querySelector('.unlikely-0')).backgroundColor"
    plain = page.evaluate(tint)
    assert plain == "rgba(0, 0, 0, 0)"
    page.check("#setting-tint")
    assert page.evaluate(tint) != plain


def test_tokens_are_marked_by_how_unlikely_they_were(page: Page, stub: Stub) -> None:
    ask_with_probabilities(page, "Where?")
    classes = page.locator(".token").evaluate_all("all => all.map(each => each.className)")
    assert classes == [
        "token",  # 93 %
        "token unlikely-2",  # 42 %
        "token",
        "token",
        "token unlikely-1",  # 12 %
        "token",
        "token unlikely-0",  # 3 %
    ]


def test_the_arrow_keys_walk_through_the_tokens(page: Page, stub: Stub) -> None:
    ask_with_probabilities(page, "Where?")
    page.focus(".answer-body")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-card .token-line")).to_contain_text("Paris")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-card .token-line")).to_contain_text("·is")
    page.keyboard.press("End")
    expect(page.locator("#token-card .token-line")).to_contain_text("3.0 %")
    page.keyboard.press("Escape")
    expect(page.locator("#token-card")).to_be_hidden()


def test_characters_split_over_tokens_come_out_whole(page: Page) -> None:
    placed = page.evaluate(
        """async () => {
          const { TokenAligner } = await import("/playground/tokens.js");
          const aligner = new TokenAligner();
          const entry = (bytes, token) => ({ token, bytes, logprob: 0, top_logprobs: [] });
          const take = (text, entries) => {
            aligner.addTokens(entries);
            return aligner.addText(text).map(({ at, end, token }) => [at, end, token.text, token.index]);
          };
          return [
            take("", [entry([0xf0, 0x9f], "\\ufffd")]),
            take("\\u{1F426} sings", [entry([0x90, 0xa6], "\\ufffd"), entry(null, " sings")]),
            take("!", [entry(null, "<|end|>"), entry(null, "!")]),
            take("late", []),
          ];
        }"""
    )
    assert placed == [[], [[0, 2, "\U0001f426", 1], [2, 8, " sings", 2]], [[8, 9, "!", 4]], []]
