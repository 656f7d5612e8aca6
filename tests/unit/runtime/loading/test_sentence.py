"""The files of sentence-transformers beside config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_files import write_tiny_gguf
from quire.config.embedding import Dense, EmbeddingSettings, Pooling
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.pooling_task import read_pooling_settings
from quire.runtime.loading.hf.sentence import read_embedding_settings
from quire.types.errors import ModelLoadError

KINDS = ("Transformer", "Pooling", "Normalize")


def write(
    folder: Path, kinds: tuple[str, ...] = KINDS, *, general: Any = None, length: Any = 256, **pooling: Any
) -> None:
    paths = ["" if kind == "Transformer" else f"{number}_{kind}" for number, kind in enumerate(kinds)]
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in zip(paths, kinds, strict=True)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length, "do_lower_case": True}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    if general is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(general))


def read(folder: Path) -> EmbeddingSettings:
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    return read_embedding_settings(ModelFiles("tiny", folder, "hf"))


def test_the_files_say_how_to_pool(tmp_path: Path) -> None:
    write(tmp_path, pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    assert read(tmp_path) == EmbeddingSettings(Pooling("mean", normalize=True), 256, lowercase=True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_without_a_normalize_module_nothing_is_normalized(tmp_path: Path, pooling: dict[str, Any], kind: Any) -> None:
    write(tmp_path, KINDS[:2], length=None, **pooling)
    assert read(tmp_path) == EmbeddingSettings(Pooling(kind, normalize=False), None, lowercase=True)


def test_a_folder_without_these_files_has_the_mean(tmp_path: Path) -> None:
    assert read(tmp_path) == EmbeddingSettings(Pooling("mean", normalize=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "max_tokens is not supported"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token, mean_tokens is not supported"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt: only true"),
        (
            {"kinds": ("Transformer", "Pooling", "LayerNorm"), "pooling_mode_mean_tokens": True},
            "Transformer, Pooling, LayerNorm",
        ),
        (
            {"kinds": ("Transformer", "Pooling", "Normalize", "Dense"), "pooling_mode_mean_tokens": True},
            "Transformer, Pooling, Normalize, Dense",
        ),
        ({"kinds": ("Transformer",)}, "made by Transformer are not supported"),
        (
            {"pooling_mode_mean_tokens": True, "general": {"default_prompt_name": "query"}},
            "default_prompt_name: is not",
        ),
        ({"pooling_mode_mean_tokens": True, "length": 0}, "max_seq_length: must be at least 1"),
    ],
)
def test_what_would_change_embeddings_and_is_not_supported_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=words):
        read(tmp_path)


def write_dense(folder: Path, number: int, **changes: Any) -> None:
    path = folder / f"{number}_Dense"
    path.mkdir(exist_ok=True)
    values = {"in_features": 64, "out_features": 96, "bias": False, "activation_function": "torch.nn.Identity"}
    (path / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize("normalizes", [False, True])
def test_dense_layers_follow_the_pooling(tmp_path: Path, normalizes: bool) -> None:
    write(tmp_path, (*KINDS[:2], "Dense", "Dense", *(KINDS[2:] if normalizes else ())), pooling_mode_mean_tokens=True)
    write_dense(tmp_path, 2, module_input_name="sentence_embedding")
    write_dense(tmp_path, 3, in_features=96, out_features=8, bias=True, activation_function="torch.nn.Tanh")
    settings = read(tmp_path)
    assert settings.pooling == Pooling("mean", normalize=normalizes)
    assert settings.dense == (Dense("2_Dense", 64, 96, False, "identity"), Dense("3_Dense", 96, 8, True, "tanh"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_function": "a.Mish"}, "activation_function: 'mish' is not supported; supported: identity, tanh"),
        ({"use_residual": True}, "use_residual: is not supported"),
        ({"in_features": 0}, "in_features: must be at least 1"),
    ],
)
def test_a_dense_layer_with_another_setting_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write(tmp_path, (*KINDS[:2], "Dense"), pooling_mode_mean_tokens=True)
    write_dense(tmp_path, 2, **changes)
    with pytest.raises(ModelLoadError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("modules", ["no json", "{}", '[{"type": "a.Transformer", "path": "../other"}]', "[1]", "[]"])
def test_damaged_modules_are_refused(tmp_path: Path, modules: str) -> None:
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read(tmp_path)


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_a_gguf_file_may_say_how_to_pool_and_then_embeds(tmp_path: Path, number: int, kind: Any) -> None:
    files = ModelFiles("tiny", write_tiny_gguf(tmp_path / "m.gguf", pooling_type=number), "gguf")
    assert read_embedding_settings(files).pooling == Pooling(kind)
    assert read_pooling_settings(files, "auto") == read_embedding_settings(files)
    assert read_pooling_settings(files, "generate") is None


@pytest.mark.parametrize("settings", [{}, {"pooling_type": 0}])
def test_a_gguf_file_that_does_not_say_generates_and_pools_the_last_token_if_asked(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    files = ModelFiles("tiny", write_tiny_gguf(tmp_path / "m.gguf", **settings), "gguf")
    assert read_pooling_settings(files, "auto") is None
    assert read_pooling_settings(files, "embed") == EmbeddingSettings(Pooling("last"))


def test_a_gguf_file_that_ranks_is_refused(tmp_path: Path) -> None:
    files = ModelFiles("tiny", write_tiny_gguf(tmp_path / "m.gguf", pooling_type=4), "gguf")
    with pytest.raises(ModelLoadError, match="pooling_type"):
        read_pooling_settings(files, "auto")
