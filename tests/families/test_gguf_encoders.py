"""Encoders in GGUF: the states, tokens and embeddings of the folders that the files were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from encoder_models import TEXTS, hf_encoder, hidden_states, load_encoder
from family_bench import HAS_TRITON
from gguf_bert import export_encoder, word_metadata
from quire import LLM
from quire.runtime.layers.linear import Linear
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.sentence import read_embedding_settings
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.models.build import count_copies
from quire.types.errors import ConfigError, ModelLoadError

FAMILIES = ("bert", "distilbert", "roberta", "xlm-roberta")
WORDS = [
    "[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'#東京",
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"), "the", "cat", "cafe", "##ing", "##ts", "сто",
]  # fmt: skip
SENTENCES = [
    "The cats sat.", "Café NAÏVE größe", "東京タワー", "a\u0301 🤗 сто!", "don't [MASK] #1", "x" * 120,
    "catsing  the\tcat\n", "##ing \u2581the [unused0] [CLS]", "İSTANBUL ﬁ", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        hf_encoder(family).save_pretrained(found[family])  # type: ignore[operator]
    return found


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary, and the files of sentence-transformers."""
    path = tmp_path_factory.mktemp("sentences")
    hf_encoder("bert", vocab_size=len(WORDS), max_position_embeddings=160).save_pretrained(path)  # type: ignore[operator]
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"path": "" if kind == "Transformer" else kind, "type": f"a.{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "Pooling").mkdir()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_folder(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    path = export_encoder(folders[family], tmp_path / "m.gguf")
    wanted = hidden_states(load_encoder(folders[family]), TEXTS)
    for found, right in zip(hidden_states(load_encoder(path), TEXTS), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_the_config_is_that_of_the_folder(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    ours = read_model_config(files_at(export_encoder(folders["bert"], tmp_path / "m.gguf", kind)))
    theirs = read_model_config(files_at(folders["bert"]))
    assert ours.dtype == ("float32" if kind == "F32" else "float16")
    for name in ("encoder", "activation", "norm_eps", "rope", "heads", "num_layers", "weights", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_quantized_tensors_are_those_of_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    path = export_encoder(folders["bert"], tmp_path / "m.gguf", "Q8_0")
    checkpoint, levels = open_checkpoint(files_at(path)), 0
    held = count_copies(checkpoint.config)
    for name in checkpoint.names:
        quantized = checkpoint.read_quantized(name)
        if quantized is not None:
            levels += quantized.values().numel() if name in held else 0
            assert torch.equal(quantized.values(), checkpoint.read(name)), name
    assert levels == checkpoint.config.levels.parameters
    wanted = hidden_states(load_encoder(folders["bert"]), TEXTS)
    for found, right in zip(hidden_states(load_encoder(path), TEXTS), wanted, strict=True):
        assert torch.nn.functional.cosine_similarity(found, right).min() > 0.999


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_kernels_that_multiply_quantized_matrices_do(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, packed = export_encoder(folders["bert"], tmp_path / "m.gguf", "Q8_0"), list[tuple[int, ...]]()
    expanded = hidden_states(load_encoder(path, kernels="reference"), TEXTS)
    pack = Linear._pack_quantized

    def count(layer: Linear, whole: Any) -> Any:
        packed.append(whole.shape)
        return pack(layer, whole)

    monkeypatch.setattr(Linear, "_pack_quantized", count)
    kept = hidden_states(load_encoder(path, kernels="triton"), TEXTS)
    assert packed == [(192, 64), (64, 64), (96, 64), (64, 96)] * 3
    for found, right in zip(kept, expanded, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("number", "mode"), [(1, "mean_tokens"), (2, "cls_token"), (3, "lasttoken"), (None, "mean_tokens")]
)
def test_tokens_and_embeddings_are_those_of_the_folder(
    number: int | None, mode: str, sentence_folder: Path, tmp_path: Path
) -> None:
    (sentence_folder / "Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    settings = {} if number is None else {"pooling_type": number}
    path = export_encoder(sentence_folder, tmp_path / "m.gguf", settings=settings, metadata=word_metadata(WORDS))
    with LLM(sentence_folder, device="cpu") as theirs, LLM(path, device="cpu") as ours:
        for found, right in zip(ours.embed(SENTENCES), theirs.embed(SENTENCES), strict=True):
            assert found.prompt_token_ids == right.prompt_token_ids
            torch.testing.assert_close(torch.tensor(found.embedding), torch.tensor(right.embedding), rtol=0, atol=1e-5)
            assert torch.tensor(found.embedding).norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention.causal": True}, "attention.causal: tokens of an encoder see the whole text"),
        ({"attention.head_count_kv": 2}, "attention.head_count_kv: must be 4"),
        ({"block_count": 4}, r"layers\.3\.\S+: is missing from the checkpoint"),
        ({"context_length": 32}, r"position_embeddings\.weight: has shape \(64, 64\), the config says \(32, 64\)"),
        ({"attention.max_alibi_bias": 8.0}, "is not a known setting of this architecture"),
        ({"rope.freq_base": 5.0}, "rope.freq_base: encoders of this kind have a table of positions"),
        ({"attention.layer_norm_rms_epsilon": 0.5}, "attention.layer_norm_rms_epsilon: .* layer norms"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    settings: dict[str, object], words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = export_encoder(folders["bert"], tmp_path / "m.gguf", settings=settings)
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(files_at(path))


def test_a_file_of_a_reranker_is_refused_by_its_pooling(folders: dict[str, Path], tmp_path: Path) -> None:
    path = export_encoder(folders["bert"], tmp_path / "m.gguf", settings={"pooling_type": 4})
    with pytest.raises(ModelLoadError, match="pooling_type: 4 is not supported; supported: 1"):
        read_embedding_settings(files_at(path))


def test_an_encoder_does_not_generate(sentence_folder: Path, tmp_path: Path) -> None:
    path = export_encoder(sentence_folder, tmp_path / "m.gguf", metadata=word_metadata(WORDS))
    with pytest.raises(ConfigError, match="'generate' is for models that generate text, and this one is an encoder"):
        LLM(path, device="cpu", task="generate")
