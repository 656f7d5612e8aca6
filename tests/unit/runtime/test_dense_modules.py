"""The Dense modules of sentence-transformers: the vectors of an encoder with them, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from encoder_models import TEXTS, expected_states, hf_encoder
from quire.config.embedding import EncoderConfig
from quire.config.engine import DeviceConfig
from quire.runtime.encoder.encoder import TextEncoder
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.sentence import read_embedding_settings
from quire.runtime.loading.model_config import read_model_config
from quire.types.errors import ModelLoadError

pytest.importorskip("transformers")
KINDS = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
FIRST, SECOND = torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_encoder("embedding_gemma").save_pretrained(tmp_path)  # type: ignore[operator]
    paths = ["" if kind == "Transformer" else f"{number}_{kind}" for number, kind in enumerate(KINDS)]
    modules = [{"path": path, "type": f"s.{kind}"} for path, kind in zip(paths, KINDS, strict=True)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    for number, layer, kind in ((2, FIRST, "Identity"), (3, SECOND, "Tanh")):
        path = tmp_path / f"{number}_Dense"
        path.mkdir()
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
        (path / "config.json").write_text(json.dumps({**sizes, "activation_function": f"torch.nn.{kind}"}))
        weights = {f"linear.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
        save_file(weights, path / "model.safetensors")
    return tmp_path


def load(folder: Path, load_format: str = "auto") -> TextEncoder:
    files = files_at(folder)
    model = read_model_config(files)
    where = DeviceConfig(device="cpu", dtype="float32", kv_dtype="float32", attention_backend="auto")
    settings, config = read_embedding_settings(files), EncoderConfig(where, model.rope.max_position, 64, 64)
    return TextEncoder(files, model, config, settings, load_format=load_format)  # type: ignore[arg-type]


def test_the_mean_of_the_states_goes_through_the_dense_layers(folder: Path) -> None:
    model, found = hf_encoder("embedding_gemma"), dict[int, torch.Tensor]()
    for batch, rows in load(folder).run(TEXTS):
        found.update(zip(batch, rows, strict=True))
    for number, text in enumerate(TEXTS):
        with torch.no_grad():
            wanted = torch.tanh(SECOND(FIRST(expected_states(model, list(text)).mean(dim=0))))
        torch.testing.assert_close(found[number], wanted, rtol=1e-4, atol=1e-4)


def test_without_weights_the_layers_are_random_and_the_size_is_the_same(folder: Path) -> None:
    ((_, rows),) = load(folder, "dummy").run(TEXTS[:1])
    assert rows.shape == (1, 8)


def test_a_layer_that_does_not_fit_the_one_before_it_is_refused(folder: Path) -> None:
    path = folder / "3_Dense/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"in_features": 64}))
    with pytest.raises(ModelLoadError, match="in_features: is 64, and what is before it gives vectors of 96 elements"):
        load(folder)


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path) -> None:
    save_file({"linear.weight": torch.ones(8, 96)}, folder / "3_Dense/model.safetensors")
    with pytest.raises(ModelLoadError, match=r"linear\.bias: is missing"):
        load(folder)
    (folder / "3_Dense/model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="is missing; store the weights of the Dense module as safetensors"):
        load(folder)
