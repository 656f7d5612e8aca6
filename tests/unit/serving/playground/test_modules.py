"""The page's modules that need no page, run by Node.js: Markdown, conversations, parameters and copied requests."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quire.serving.playground import files

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")

OFFSETS = """
const { parseBlocks } = await import("./markdown_blocks.js");
const { parseInline } = await import("./markdown_inline.js");
const PIECES = ["a", "b c", " ", "\\n", "\\n\\n", "*", "**", "_", "~~", "`", "```", "[", "](", ")", "https://x.y", "|",
  "|-|-|", "- ", "1. ", "  ", "    ", "> ", "# ", "\\\\", "&lt;", "<br>", "![", "\\t", "---", "- [x] ", "\\u{1F426}"];
let state = 7;
const random = (n) => (state = (state * 1103515245 + 12345) % 2147483648) % n;
const wrong = [];
function leaves(text, nodes) {
  for (const node of nodes) {
    if (node.children) leaves(text, node.children);
    else if (node.type === "text") {
      const source = text.slice(node.at, node.at + node.length).replaceAll("\\t", " ").replaceAll("\\n", " ");
      const isEscape = node.text.length !== node.length && /^[\\\\&]/.test(source);
      if (source !== node.text && !isEscape) wrong.push([text, node]);
    }
  }
}
function walk(text, blocks) {
  for (const block of blocks) {
    if (block.type === "code") {
      const isWrong = (line) => text.slice(line.at, line.at + line.text.length) !== line.text;
      wrong.push(...block.lines.filter(isWrong).map((line) => [text, line]));
    }
    if (block.lines && block.type !== "code") leaves(text, parseInline(block.lines));
    const cells = [block.head ?? [], ...(block.rows ?? [])].flat();
    for (const cell of cells) leaves(text, parseInline([cell]));
    walk(text, block.blocks ?? []);
    for (const item of block.items ?? []) walk(text, item.blocks);
  }
}
for (let i = 0; i < 5000; i++) {
  let text = "";
  for (let j = random(40); j >= 0; j--) text += PIECES[random(PIECES.length)];
  walk(text, parseBlocks(text));
}
console.log(JSON.stringify(wrong.slice(0, 3)));
"""

TREE = """
const { Conversation, newReply, readConversation } = await import("./conversation.js");
const chat = new Conversation();
const ask = (text, after) => chat.add({ role: "user", text }, after);
const reply = (text, after) => chat.add(newReply([{ text, finish: "stop" }]), after);
const first = ask("one", null);
const answer = reply("1", first);
const failed = reply("", ask("lost", answer));
const third = ask("three", failed);
const kept = chat.messages("sys", third).map((message) => message.content);
const edited = ask("ONE", null);
const shown = chat.path().map((turn) => turn.text);
chat.select(first);
const back = chat.path().map((turn) => turn.text ?? turn.answers[0].text);
const copy = readConversation(JSON.parse(JSON.stringify(chat)));
const branch = chat.branchAt(answer).path().length;
const twice = readConversation({ ...JSON.parse(JSON.stringify(chat)), turns: [first, first] });
const same = JSON.stringify(copy) === JSON.stringify(chat);
console.log(JSON.stringify({ kept, shown, back, same, branch, twice, edited: edited.parent }));
"""

SNIPPET = """
const { pythonSnippet } = await import("./snippets.js");
const body = JSON.parse(process.argv[2]);
console.log(JSON.stringify(pythonSnippet(new URL("http://127.0.0.1:1/"), body, false)));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's modules, which Node.js takes for modules too."""
    folder = tmp_path_factory.mktemp("page")
    for name, (content, _) in files().items():
        (folder / name).write_bytes(content)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def run(folder: Path, script: str, *arguments: str) -> Any:
    assert NODE is not None
    (folder / "script.js").write_text(script)
    command = [NODE, "script.js", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_text_of_random_markdown_knows_its_place_in_the_source(folder: Path) -> None:
    assert run(folder, OFFSETS) == []


def test_a_conversation_is_a_tree_whose_selected_branch_is_sent(folder: Path) -> None:
    told = run(folder, TREE)
    assert told["kept"] == ["sys", "one", "1", "three"]  # a question without an answer is left out
    assert told["shown"] == ["ONE"]
    assert told["back"] == ["one", "1", "lost", "", "three"]
    assert told["same"] is True
    assert told["branch"] == 2
    assert told["twice"] is None  # two turns of one id could make an endless path
    assert told["edited"] is None


def test_a_request_copied_as_python_holds_the_same_values(folder: Path) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": 'It\'s "5" \\ €\n\U0001f426'}],
        "temperature": 0.5,
        "top_k": 3,
        "tools": [{"function": {"strict": True, "parameters": {}, "x": None}}],
    }
    program = run(folder, SNIPPET, json.dumps(body))
    given: dict[str, Any] = {}

    class Completions:
        def create(self, **parameters: Any) -> Any:
            given.update(parameters)
            raise StopIteration

    class Client:
        def __init__(self, base_url: str, api_key: str) -> None:
            given["base_url"] = base_url
            self.chat = type("Chat", (), {"completions": Completions()})

    code = program.replace("from openai import OpenAI", "")
    with pytest.raises(StopIteration):
        exec(code, {"OpenAI": Client})
    assert given.pop("extra_body") == {"top_k": 3}
    assert given.pop("base_url") == "http://127.0.0.1:1/v1"
    assert given == {name: value for name, value in body.items() if name != "top_k"}
