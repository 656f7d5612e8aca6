"""What the guide on clients tells people to write works with the clients it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.clients.conftest import Served

pytestmark = pytest.mark.model
FOLDER = Path(__file__).parent / "javascript"
WRITTEN = "http://127.0.0.1:8000"
PAGE = (Path(__file__).parents[2] / "docs/guides/clients.md").read_text(encoding="utf-8")


def blocks(title: str, language: str) -> list[str]:
    text = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def python_titles() -> list[str]:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    return [title for title in titles if blocks(title, "python")]


def at_server(served: Served, text: str) -> str:
    return text.replace(WRITTEN, served.url)


def stream_chat(base_url: str, key: str, body: dict[str, Any]) -> str:
    """The text of a streamed chat, as editors and web pages ask for it."""
    text = ""
    asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, **body}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", f"{base_url}/chat/completions", json={**asked, "stream": True}, headers=headers, timeout=300
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text


def test_the_guide_has_a_program_for_every_python_client() -> None:
    assert len(python_titles()) >= 6


@pytest.mark.parametrize("title", python_titles())
def test_a_program_is_answered(served: Served, title: str) -> None:
    for program in blocks(title, "python"):
        for module in re.findall(r"^(?:from|import) ([\w.]+)", program, re.MULTILINE):
            pytest.importorskip(module)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", at_server(served, program)],
            env=os.environ | {"HF_HUB_OFFLINE": "0"},  # with 1, Hugging Face's client sends nothing to any server
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="run npm install in tests/clients/javascript")
def test_the_javascript_program_is_answered(served: Served) -> None:
    (program,) = blocks("OpenAI, JavaScript", "js")
    command = ["node", "--input-type=module", "--eval", at_server(served, program)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_litellms_proxy_finds_the_model_of_its_settings(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    (settings,) = blocks("LiteLLM", "yaml")
    router = litellm.Router(**yaml.safe_load(at_server(served, settings)))
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in router.completion(model="local", messages=asked, temperature=0).choices[0].message.content


def test_lm_evals_arguments_make_a_model_that_answers(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from quire.runtime.loading.resolve import resolve_model

    (command,) = blocks("lm-eval", "sh")
    words = at_server(served, command).replace("\\\n", " ").split()
    arguments = words[words.index("--model_args") + 1]
    source = resolve_model(None, offline=True).path
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(tmp_path)
    local = re.sub(r"tokenizer=[\w/.-]+", f"tokenizer={tmp_path}", arguments)  # the hub is not asked
    assert local != arguments
    model = get_model(words[words.index("--model") + 1]).create_from_arg_string(local)
    asked = [
        Instance("loglikelihood", {}, ("The capital of France is", answer), index)
        for index, answer in enumerate((" Paris", " banana"))
    ]
    (paris, _), (banana, _) = model.loglikelihood(asked, disable_tqdm=True)
    assert paris > banana


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_open_webui_finds_the_models_with_its_settings(served: Served) -> None:
    (block,) = blocks("Open WebUI", "sh")
    *settings, start = at_server(served, block).splitlines()
    assert start.startswith("open-webui serve")
    done = subprocess.run(["sh", "-e", "-c", "\n".join(settings)], capture_output=True, text=True, check=True)
    (model,) = [entry["id"] for entry in json.loads(done.stdout)["data"]][:1]
    exports = dict(re.findall(r"export (\w+)=(\S+)", "\n".join(settings)))
    asked = {"model": model, "stream_options": {"include_usage": False}, "metadata": {"chat_id": "1"}}
    assert "Paris" in stream_chat(exports["OPENAI_API_BASE_URL"], exports["OPENAI_API_KEY"], asked)


def test_continue_reaches_the_model_of_its_settings(served: Served) -> None:
    (block,) = blocks("Continue", "yaml")
    (settings,) = yaml.safe_load(at_server(served, block))["models"]
    assert settings["provider"] == "openai"
    asked = {"model": settings["model"], "max_tokens": 64}
    assert "Paris" in stream_chat(settings["apiBase"], settings["apiKey"], asked)


def test_a_codex_style_agent_reaches_the_model_of_its_settings(served: Served) -> None:
    (block,) = blocks("Codex-style agents", "toml")
    settings = tomllib.loads(at_server(served, block))
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["wire_api"] == "responses"
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs a shell command and returns its output.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    content = [{"type": "input_text", "text": "What is the capital of France?"}]
    body = {
        "model": settings["model"],
        "instructions": "You are a helpful assistant.",
        "input": [{"type": "message", "role": "user", "content": content}],
        "tools": [shell],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1",
    }
    with httpx.stream("POST", f"{provider['base_url']}/responses", json=body, timeout=300) as response:
        assert response.status_code == 200, response.read()
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in events[-1]["response"]["output"]]


def test_claude_style_agents_reach_the_model_with_their_variables(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    anthropic = pytest.importorskip("anthropic")
    address = re.findall(r"`ANTHROPIC_BASE_URL=(\S+)`", PAGE)[0]
    monkeypatch.setenv("ANTHROPIC_BASE_URL", at_server(served, address))
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "none")
    with anthropic.Anthropic() as client:
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.messages.create(model=served.model, max_tokens=40, messages=asked)
    assert "Paris" in answer.content[0].text
