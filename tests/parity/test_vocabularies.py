"""The vocabularies that llama.cpp is tested with, as GGUF files, with texts and the ids of their makers' tokenizers.

They are not ours to hand on: they come with a source package, fetched where the whole matrix is asked for. pip prepares
its build for that, which takes minutes: QUIRE_TEST_LLAMA_CPP may name the package's file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.cursor import Texts
from quire.runtime.loading.gguf.reader import GgufFile
from quire.serving.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.skipif("QUIRE_TEST_WHOLE" not in os.environ, reason="fetches 77 MB; make parity runs it")

PACKAGE, FOLDER = "llama-cpp-python==0.3.36", "vendor/llama.cpp/models/ggml-vocab-"
NAMES = (
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("vocabularies")
    source = os.environ.get("QUIRE_TEST_LLAMA_CPP")
    if source is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        if subprocess.run([*command, "-d", str(target), PACKAGE], check=False).returncode:
            pytest.skip("the package index does not have the vocabularies")
        (path,) = target.glob("*.tar.gz")
        source = str(path)
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isfile() and FOLDER in member.name:
                content = archive.extractfile(member)
                assert content is not None
                (target / Path(member.name).name).write_bytes(content.read())
    return target


def load(folder: Path, name: str) -> Tokenizer:
    return load_tokenizer(ModelFiles(name, folder / f"ggml-vocab-{name}.gguf", "gguf"))


def texts_of(folder: Path, name: str) -> list[str]:
    stored = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode()
    return stored.split("\n__ggml_vocab_test__\n")


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_makers(folder: Path, name: str) -> None:
    tokenizer, texts = load(folder, name), texts_of(folder, name)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").split("\n")
    assert len(lines) - len(texts) in (0, 1)  # an empty line at the end
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(index) for index in line.split()], text


def test_unigram_ids_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    name = "nomic-bert-moe"  # XLM-RoBERTa's vocabulary; without ids of its makers
    file = GgufFile(folder / f"ggml-vocab-{name}.gguf")
    tokens, scores = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    charsmap = file.metadata["tokenizer.ggml.precompiled_charsmap"]
    file.close()
    assert isinstance(tokens, Texts)
    assert isinstance(scores, list)
    assert isinstance(charsmap, list)
    other = transformers.XLMRobertaTokenizer(
        list(zip(tokens, scores, strict=True)), _spm_precompiled_charsmap=bytes(charsmap)
    )
    tokenizer = load(folder, name)
    assert tokenizer.encode("Hello world") == [0, 35378, 8999, 2]
    for text in [
        *texts_of(folder, "bert-bge"),
        " a  b\tc\n",
        "½ １２３ ﬁne ㍿ \u200b\u3000x",
        "東京タワー 안녕하세요 👩‍👧",
    ]:
        assert tokenizer.encode(text) == other(text).input_ids, text
