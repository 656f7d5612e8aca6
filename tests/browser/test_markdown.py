"""Markdown in answers: what a model writes becomes elements, and nothing that it writes becomes markup of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from playground_hand import ask, expect, open_settings, wait_for_answer
from playground_stub import Stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    '"><svg onload=document.title=1>',
    "[a](javascript:document.title='owned')",
    "[a](JaVaScRiPt:alert)",
    "[a](data:text/html,owned)",
    "<a href='javascript:alert'>b</a>",
    "x \u202e this",
]
RENDER = """async (text) => {
  const { MarkdownView } = await import("/playground/markdown_view.js");
  const body = document.createElement("div");
  new MarkdownView(body).update(text);
  for (const head of body.querySelectorAll(".code-head")) head.remove();
  for (const each of body.querySelectorAll("*")) {
    for (const name of each.getAttributeNames()) {
      const kept = ["href", "start"].includes(name) || (name === "class" && /^(center|right)$/.test(each.className));
      if (!kept) each.removeAttribute(name);
    }
  }
  return body.innerHTML;
}"""
DEEP = [
    "*a " * 20_000 + "a* " * 20_000,
    "[" * 30_000 + "](x)" * 20,
    "> " * 5_000 + "x",
    "- " * 5_000 + "x",
    "`" * 9_999,
]
CASES = {
    "**bold** and *slanted* and ***both***": "<p><strong>bold</strong> and <em>slanted</em> and "
    "<em><strong>both</strong></em></p>",
    "snake_case_name and 2 * 3 * 4 and ~~gone~~": "<p>snake_case_name and 2 * 3 * 4 and <del>gone</del></p>",
    "`a < b` and ``a ` b``": "<p><code>a &lt; b</code> and <code>a ` b</code></p>",
    "one\ntwo": "<p>one<br>two</p>",
    "# Title\n### Third ###\n# C#": "<h3>Title</h3><h5>Third</h5><h3>C#</h3>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "- a\n- b\n  - c\n- d": "<ul><li><span>a</span></li><li><span>b</span><ul><li><span>c</span></li></ul></li>"
    "<li><span>d</span></li></ul>",
    "3. a\n4. b": '<ol start="3"><li><span>a</span></li><li><span>b</span></li></ol>',
    "10. a\n   - b\n11. c": '<ol start="10"><li><span>a</span><ul><li><span>b</span></li></ul></li>'
    "<li><span>c</span></li></ol>",
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "1. a\n   ```\n   x\n   ```\n2. b": "<ol><li><span>a</span><div><pre><code>x</code></pre></div></li>"
    "<li><span>b</span></li></ol>",
    "- [x] done\n- [ ] open": "<ul><li><input><span>done</span></li><li><input><span>open</span></li></ul>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li><span>b</span></li></ul></blockquote>",
    "|a|b|\n|-|-:|\n|1|`x|y`|\n|only|": '<div><table><thead><tr><th>a</th><th class="right">b</th></tr></thead><tbody>'
    '<tr><td>1</td><td class="right"><code>x|y</code></td></tr><tr><td>only</td><td class="right"></td></tr>'
    "</tbody></table></div>",
    "a | b": "<p>a | b</p>",
    '[text](https://example.org/a_(b) "t")': '<p><a href="https://example.org/a_(b)">text</a></p>',
    "See https://example.org/x.": '<p>See <a href="https://example.org/x">https://example.org/x</a>.</p>',
    "![chart](https://example.org/c.png)": '<p><a href="https://example.org/c.png">chart</a></p>',
    "[home](/admin)": "<p>[home](/admin)</p>",
    r"\*plain\* &lt;b&gt; &#x41;": "<p>*plain* &lt;b&gt; A</p>",
    "a<br>b <b>c</b>": "<p>a<br>b &lt;b&gt;c&lt;/b&gt;</p>",
    "```\nstill being": "<div><pre><code>still being</code></pre></div>",
    "~~~\n```\n~~~": "<div><pre><code>```</code></pre></div>",
    "*unclosed **both": "<p>*unclosed **both</p>",
}


@pytest.fixture(scope="module")
def shared_page(browser: object) -> object:
    from playwright.sync_api import Browser

    assert isinstance(browser, Browser)
    with Stub().running() as stub:
        page = browser.new_page()
        page.goto(f"{stub.url}/")
        yield page
        page.close()


@pytest.mark.parametrize("text", CASES)
def test_markdown_becomes_the_elements_it_stands_for(shared_page: Page, text: str) -> None:
    assert shared_page.evaluate(RENDER, text) == CASES[text]


@pytest.mark.parametrize("text", DEEP, ids=[text[:6] for text in DEEP])
def test_text_made_to_nest_deeply_is_shown_and_does_not_break_the_page(shared_page: Page, text: str) -> None:
    depth = shared_page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/playground/markdown_view.js");
          const body = document.createElement("div");
          new MarkdownView(body).update(text);
          const depth = (element) => 1 + Math.max(0, ...[...element.children].slice(0, 50).map(depth));
          return depth(body);
        }""",
        text,
    )
    assert depth < 60


def test_an_answer_that_grows_looks_at_its_end_as_if_it_came_at_once(shared_page: Page) -> None:
    text = "\n\n".join(CASES)
    whole, grown = shared_page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/playground/markdown_view.js");
          const [once, growing] = [document.createElement("div"), document.createElement("div")];
          new MarkdownView(once).update(text);
          const view = new MarkdownView(growing);
          for (let i = 0; i <= text.length; i += 3) view.update(text.slice(0, i));
          view.update(text);
          return [once.innerHTML, growing.innerHTML];
        }""",
        text,
    )
    assert whole == grown


def test_a_block_that_is_finished_keeps_its_elements_while_others_are_written(shared_page: Page) -> None:
    same = shared_page.evaluate(
        """async () => {
          const { MarkdownView } = await import("/playground/markdown_view.js");
          const body = document.createElement("div");
          const view = new MarkdownView(body);
          view.update("first\\n\\nsec");
          const first = body.firstElementChild;
          view.update("first\\n\\nsecond\\n\\nthird");
          return [body.firstElementChild === first, body.children.length];
        }"""
    )
    assert same == [True, 3]


def test_markup_in_question_and_answer_is_shown_as_text(page: Page, stub: Stub) -> None:
    for text in HOSTILE:
        stub.script.answer = text
        ask(page, text)
        wait_for_answer(page)
    said = "all => all.map(each => each.textContent)"
    assert page.locator(".reply .answer-body").evaluate_all(said) == HOSTILE
    assert page.locator(".question .bubble").evaluate_all(said) == HOSTILE
    assert page.locator(".answer-body :is(img, svg, script, a), .bubble *").count() == 0
    assert page.title() == "Quire playground"


def test_a_link_opens_elsewhere_and_tells_nothing_of_this_page(page: Page, stub: Stub) -> None:
    stub.script.answer = "See [the docs](https://example.org/docs)."
    ask(page, "Where?")
    wait_for_answer(page)
    link = page.locator(".answer-body a")
    assert link.get_attribute("target") == "_blank"
    assert link.get_attribute("rel") == "noopener noreferrer"


def test_fenced_code_keeps_its_characters_and_can_be_copied(page: Page, stub: Stub) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = "def f(a):\n\tif a < b:  # why\n        return '`' + \"x\" * 2"
    stub.script.answer = f"Like this:\n```python\n{code}\n```\nDone ``` not a fence."
    ask(page, "Show code.")
    wait_for_answer(page)
    assert page.locator(".answer-body pre").evaluate("pre => pre.textContent") == code
    expect(page.locator(".code-head")).to_contain_text("python")
    assert page.locator(".answer-body p").last.inner_text() == "Done ``` not a fence."
    assert page.locator(".code-keyword").all_inner_texts() == ["def", "if", "return"]
    assert page.locator(".code-comment").all_inner_texts() == ["# why"]
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_every_token_of_a_formatted_answer_can_be_found_on_the_page(page: Page, stub: Stub) -> None:
    stub.script.answer = "**Paris** is\n\n- one `two`\n- three\n\n```\nfour five\n```"
    open_settings(page)
    page.check("#setting-logprobs")
    ask(page, "Format.")
    wait_for_answer(page)
    words = ["Paris", " is", " one", "two", " three", "four", " five"]
    tokens = page.locator(".answer-body .token").all_text_contents()
    assert [token for token in tokens if token.strip() in {word.strip() for word in words}] == [
        "Paris",
        " is",
        "one",  # the space before it is the list marker's
        "two",
        "three",
        "four",
        " five",
    ]
