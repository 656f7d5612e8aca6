"""What the page says of a request's ledger: its own modules, run by Node.js over a document that only keeps text."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quire.serving.playground import files

NODE = shutil.which("node")
SCRIPT = """
class Element {
  constructor() { this.children = []; this.textContent = ""; this.style = {}; }
  append(...children) { this.children.push(...children); }
  setAttribute() {}
  get words() { return [this.textContent, ...this.children.map((child) => child.words ?? child)].join(""); }
}
globalThis.document = { createElement: () => new Element() };
const { ledgerView } = await import("./ledger.js");
const [, phases, lines] = ledgerView(JSON.parse(process.argv[2])).children;
console.log(JSON.stringify({
  phases: phases.children.map((item) => item.words),
  lines: lines.children.map((item) => item.children[1].words),
}));
"""

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's modules, which Node.js takes for modules too."""
    folder = tmp_path_factory.mktemp("page")
    for name, (content, _) in files().items():
        (folder / name).write_bytes(content)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "show.js").write_text(SCRIPT)
    return folder


def shown(page: Path, entries: list[dict[str, Any]]) -> Any:
    """The phases and the lines that the page shows for a ledger."""
    assert NODE is not None
    command = [NODE, "show.js", json.dumps(entries)]
    done = subprocess.run(command, cwd=page, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def missed(page: Path, amount: int, note: str, **miss: Any) -> str:
    """The line of an entry that says why a prefix was not found."""
    entry = {"kind": "missed", "at_ms": 2.0, "amount": amount, "note": note}
    entries = [
        entry | ({"miss": miss} if miss else {}),
        {"kind": "finished", "at_ms": 9.0, "amount": 1, "note": "stop"},
    ]
    line: str = shown(page, entries)["lines"][0]
    return line


def test_a_prompt_that_differs_is_shown_with_its_token_and_the_other_request(page: Path) -> None:
    miss = {"reason": "differs", "token_index": 6, "token_id": 5, "token": ' "so"', "request_id": "cmpl-first~12ab34"}
    assert missed(page, 7, "unused", **miss) == (
        'The prefix cache ended before token 7, " \\"so\\"". From there on the prompt differs from request first.'
    )
    assert missed(page, 7, "unused", **{**miss, "request_id": None}).endswith("differs from another request.")


def test_a_prompt_that_was_evicted_is_shown_with_how_much_when_and_by_which_policy(page: Path) -> None:
    miss = {"reason": "evicted", "token_index": 16, "num_tokens": 112, "seconds_ago": 41.7, "policy": "lru"}
    assert missed(page, 17, "unused", **miss) == (
        "The prefix cache ended before token 17. "
        "112 tokens from there on were evicted 41.7 s earlier, by the lru policy."
    )
    assert "1 token from there on was evicted" in missed(page, 17, "unused", **{**miss, "num_tokens": 1})


def test_a_prompt_that_nobody_sent_is_shown_as_not_cached(page: Path) -> None:
    words = missed(page, 1, "unused", reason="not_cached", token_index=0, token_id=5, token="Hi")
    assert words == 'The prefix cache ended before token 1, "Hi". Nothing of the prompt is cached.'
    assert "Nothing more" in missed(page, 9, "unused", reason="not_cached", token_index=8)


def test_the_time_after_a_miss_counts_as_prefill(page: Path) -> None:
    kinds = [("received", 0), ("queued", 1), ("admitted", 2), ("missed", 3), ("chunk", 5), ("first_token", 7)]
    entries = [{"kind": kind, "at_ms": float(at), "amount": 1, "note": ""} for kind, at in kinds]
    entries.append({"kind": "finished", "at_ms": 12.0, "amount": 4, "note": "length"})
    assert shown(page, entries)["phases"] == [
        "before the engine 1 ms",
        "waiting 1 ms",
        "prefill 5 ms",
        "decoding 5 ms",
    ]
