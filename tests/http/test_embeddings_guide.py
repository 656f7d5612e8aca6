"""What the guide to embeddings tells people to type works, against `quire serve` of a tiny encoder."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from encoder_models import hf_encoder
from real_server import RealServer

pytest.importorskip("transformers")
GUIDE = (Path(__file__).parents[2] / "docs/guides/embeddings.md").read_text(encoding="utf-8")
WRITTEN = "http://127.0.0.1:8000"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "man", "is", "eating", "food", "it", "rains", "what", "eaten", "."]


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [block for block in found if WRITTEN in block]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("encoder")
    hf_encoder("bert").save_pretrained(path)
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(path / "tokenizer.json"))
    one = RealServer(path, ("--device", "cpu", "--threads", "1", "--served-model-name", "minilm"))
    yield one
    one.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_are_answered(server: RealServer) -> None:
    (block,) = blocks("sh")
    script = block.replace(WRITTEN, server.url).replace("\ncurl", "\necho\ncurl")
    done = subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True, timeout=300, check=True)
    embedded, scored, ranked, ollama = map(json.loads, done.stdout.splitlines())
    assert [len(one["embedding"]) for one in embedded["data"]] == [64, 64]
    assert [one["index"] for one in scored["data"]] == [0, 1]
    assert len(ranked["results"]) == 1
    assert len(ollama["embeddings"][0]) == 64


def test_the_client_is_answered(server: RealServer) -> None:
    pytest.importorskip("openai")
    (block,) = blocks("python")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.replace(WRITTEN, server.url), "guide", "exec"), names := dict[str, Any]())
    names["client"].close()
    assert len(json.loads(out.getvalue())) == 4


def test_metrics_count_requests_and_texts_over_the_whole_stack(server: RealServer) -> None:
    with server.client() as client:
        before = client.post("/v1/embeddings", json={"input": ["a man", "food"]}).json()
        page = client.get("/metrics").text
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert before["usage"]["prompt_tokens"] == 7
    assert re.search(r'http_requests_total\{endpoint="embeddings",model_name="minilm"\} [1-9]', page)
    assert chat.status_code == 400
