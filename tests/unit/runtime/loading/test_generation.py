"""The sampling that a model's makers recommend is found in its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.runtime.loading import generation
from quire.runtime.loading.catalogue import CATALOGUE, DEFAULT, PackagedModel
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.generation import read_sampling_defaults
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.support.gguf_files import write_gguf

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": 1}


def folder(path: Path, values: object | None = None) -> ModelFiles:
    if values is not None:
        (path / "generation_config.json").write_text(json.dumps(values))
    return ModelFiles("tiny", path, "hf")


def test_generation_config_is_read_by_the_names_of_sampling_params(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(folder(tmp_path, {**QWEN, "repetition_penalty": 1.05, "max_new_tokens": 99}))
    assert defaults.given() == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }
    assert defaults.params() == SamplingParams(**defaults.given())


def test_a_model_that_says_nothing_has_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(folder(tmp_path)) == NO_DEFAULTS
    assert read_sampling_defaults(folder(tmp_path, {"temperature": None, "eos_token_id": 2})) == NO_DEFAULTS
    assert NO_DEFAULTS.params() == SamplingParams()


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_one_setting_turns_the_recommendations_off(tmp_path: Path, source: str) -> None:
    files = folder(tmp_path, QWEN)
    assert read_sampling_defaults(files, source) == NO_DEFAULTS
    assert read_sampling_defaults(files, source, {"top_k": 5}) == SamplingDefaults(top_k=5)


def test_another_folder_can_give_the_values(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    folder(other, {"temperature": 0.1})
    assert read_sampling_defaults(folder(tmp_path, QWEN), str(other)) == SamplingDefaults(temperature=0.1)


def test_single_values_can_be_overridden_and_removed(tmp_path: Path) -> None:
    files = folder(tmp_path, QWEN)
    override = {"temperature": 0.0, "top_k": None, "max_new_tokens": 7}
    assert read_sampling_defaults(files, "auto", override) == SamplingDefaults(
        temperature=0.0, top_p=0.95, max_tokens=7
    )


@pytest.mark.parametrize(
    ("values", "key"), [({"top_p": 7}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"), ({"top_k": "x"}, "top_k")]
)
def test_an_impossible_value_is_refused_by_file_and_key(tmp_path: Path, values: object, key: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {key}: .*generation_config to .none."):
        read_sampling_defaults(folder(tmp_path, values))
    assert read_sampling_defaults(folder(tmp_path), "none") == NO_DEFAULTS


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [
        ("nowhere/at/all", None, r'^generation_config: .*"none"'),
        ("", None, "^generation_config"),
        ("auto", {"temprature": 1}, r"^override_generation_config\.temprature: .*did you mean temperature\?"),
        ("auto", {"top_p": 7}, r"^override_generation_config\.top_p: must be in \(0, 1\]"),
        ("auto", ["top_p"], "^override_generation_config: must be an object"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, source: str, override: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sampling_defaults(folder(tmp_path, QWEN), source, override)  # type: ignore[arg-type]


def test_gguf_metadata_may_hold_the_values(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
    }
    path = write_gguf(tmp_path / "tiny.gguf", metadata, [])
    expected = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert read_sampling_defaults(ModelFiles("tiny", path, "gguf")) == expected


def test_a_packaged_file_without_values_gets_those_of_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "packaged.gguf", {"general.architecture": "llama"}, [])
    files = ModelFiles("tiny", path, "gguf")
    assert read_sampling_defaults(files) == NO_DEFAULTS
    own = SamplingDefaults(temperature=0.3)
    entry = PackagedModel("r", "m", "packaged.gguf", path.stat().st_size, "", 0, own)
    monkeypatch.setattr(generation, "CATALOGUE", {"packaged": entry})
    assert read_sampling_defaults(files) == own


def test_the_default_model_has_recommended_sampling() -> None:
    entry = CATALOGUE[DEFAULT]
    assert isinstance(entry, PackagedModel)
    assert entry.sampling.temperature is not None
