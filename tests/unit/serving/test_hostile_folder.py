"""A model directory that tries to run code: loading it and answering executes none of its files, opens nothing outside
of it, starts no process and connects nowhere. Seen by Python's audit events."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tiny_served import FLAGS, write_tiny_model

EVIL = "from pathlib import Path\n(Path(__file__).parent.parent / 'ran').touch()\n"
CODE = ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py", "handler.py", "__init__.py")
HEARD = ("open", "exec", "import", "subprocess.Popen", "os.system", "socket.connect")


class Audit:
    """Python's audit events of these kinds while it listens. A hook cannot be removed, so there is only one."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self._listens = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._listens and event in HEARD:
            self.events.append((event, arguments))

    @contextmanager
    def listening(self) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
        self.events.clear()
        self._listens = True
        try:
            yield self.events
        finally:
            self._listens = False


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model with code in every place where other engines look for it, and names that lead out of it."""
    folder, outside = write_tiny_model(tmp_path / "model"), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    for name in CODE:
        (folder / name).write_text(EVIL)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR.")
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    away = {"_name_or_path": "../outside", "tokenizer_file": "../outside/secret.json"}
    changes: dict[str, dict[str, object]] = {
        "config.json": {
            "auto_map": auto, "_attn_implementation_internal": "../outside/secret", "trust_remote_code": True, **away,
        },
        "tokenizer_config.json": {
            "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil", **away,
            "added_tokens_file": "../outside/secret.json", "chat_template_file": "../outside/secret.json",
        },
    }  # fmt: skip
    for name, more in changes.items():
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**held, **more}))
    return folder


def test_a_directory_that_would_run_code_is_served_and_none_of_it_runs(folder: Path, audit: Audit) -> None:
    outside = str(folder.parent / "outside")
    with audit.listening() as events:
        llm = LLM(str(folder), load_format=FLAGS[1], dtype="float32", threads=1, max_model_len=256, verbose=False)
        with llm:
            chat = [{"role": "user", "content": "hello"}]
            (answer,) = llm.chat(chat, SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 4
    opened = [os.fsdecode(path) for event, (path, *_) in events if event == "open" and not isinstance(path, int)]
    executed = [code.co_filename for event, (code, *_) in events if event == "exec" and hasattr(code, "co_filename")]
    imported = [str(name) for event, (name, *_) in events if event == "import"]
    assert any(path.startswith(str(folder)) for path in opened), "the hook hears nothing"
    assert not [path for path in opened if os.path.realpath(path).startswith(outside)]
    assert not [path for path in opened if path.startswith(str(folder)) and path.endswith((".py", ".bin"))]
    assert not [path for path in executed if path.startswith(str(folder))]
    assert not [name for name in imported if "evil" in name]
    assert not [event for event, _ in events if event in ("subprocess.Popen", "os.system", "socket.connect")]
    assert not (folder.parent / "ran").exists()
