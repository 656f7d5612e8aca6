"""PEFT folders: what is read, and what is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_files import PREFIX, SMALL, change_adapter, make_adapter, write_adapter
from quire.config.engine import DeviceConfig
from quire.kernels.native.loader import why_not_native
from quire.runtime.adapters.peft import read_peft_config
from quire.runtime.adapters.reader import AdapterReader
from quire.runtime.adapters.slots import AdapterSlots, HostAdapter
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.weights import Placement
from quire.runtime.models.build import build_model
from quire.types.errors import InvalidRequest
from tiny_models import tiny_config, transformers_model

CONFIG = tiny_config(num_layers=2)
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return transformers_model(CONFIG)


@pytest.fixture(scope="module")
def reader() -> AdapterReader:
    return make_reader("torch")


def make_reader(kernels: str) -> AdapterReader:
    device = DeviceConfig("cpu", "float32", "float32", attention_backend="reference")
    built = build_model(CONFIG, LayerBuilder(device, CONFIG.heads))
    placement = Placement(torch.float32, torch.device("cpu"))
    return AdapterReader(built, CONFIG, AdapterSlots(built, SMALL, placement, kernels))


def refusal(reader: AdapterReader, folder: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        reader.read(str(folder))
    assert caught.value.field == "lora_path"  # as the endpoints call it
    assert str(folder) not in str(caught.value)  # clients learn no paths
    return str(caught.value)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def scales(adapter: HostAdapter, reader: AdapterReader, folder: Path) -> dict[str, float]:
    """What B was multiplied by, for each module."""
    stored = load_file(folder / "adapter_model.safetensors")
    held = {pair.target: pair.b for pair in adapter.pairs}
    found = {}
    for name, targets in reader._slots.targets.items():
        if (tensor := f"{PREFIX}{name}.lora_B.weight") in stored:
            found[name] = float((held[targets[0]] / stored[tensor]).mean())
    return found


def test_all_linear_modules_are_read_with_the_scale_of_their_rank(
    reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    adapter = reader.read(str(make_adapter(tmp_path, model, rank=4, alpha=6.0)))
    assert len(adapter.pairs) == 7 * CONFIG.num_layers + 1  # and the head
    assert adapter.rank == 4
    assert all(scale == pytest.approx(1.5) for scale in scales(adapter, reader, tmp_path).values())


@pytest.mark.skipif(why_not_native(torch.float32, torch.device("cpu")) is not None, reason="no compiled kernels")
def test_compiled_kernels_get_bfloat16_where_that_is_exact(model: torch.nn.Module, tmp_path: Path) -> None:
    native = make_reader("native")
    for alpha, of_b in ((8.0, torch.bfloat16), (6.5, torch.float32)):  # B by 2, and by 1.625
        folder = make_adapter(tmp_path / str(alpha), model, alpha=alpha, dtype=torch.bfloat16)
        pairs = native.read(str(folder)).pairs
        assert {(pair.a.dtype, pair.b.dtype) for pair in pairs} == {(torch.bfloat16, of_b)}
        plain = make_reader("torch").read(str(folder)).pairs
        assert all(torch.equal(one.b.float(), two.b) for one, two in zip(pairs, plain, strict=True))
    folder = make_adapter(tmp_path / "float32", model)
    assert {pair.a.dtype for pair in native.read(str(folder)).pairs} == {torch.float32}


def test_rslora_and_patterns_change_scales(reader: AdapterReader, model: torch.nn.Module, tmp_path: Path) -> None:
    make_adapter(
        tmp_path, model, rank=4, alpha=6.0, use_rslora=True, ranks={QUERY: 9},
        alpha_pattern={r"layers\.1\.mlp\.up_proj": 2.0, "o_proj": 8.0},
    )  # fmt: skip
    adapter = reader.read(str(tmp_path))
    found = scales(adapter, reader, tmp_path)
    assert adapter.rank == 9
    assert found[QUERY] == pytest.approx(6.0 / 3.0)
    assert found["model.layers.1.mlp.up_proj"] == pytest.approx(2.0 / 2.0)
    assert found["model.layers.0.mlp.up_proj"] == pytest.approx(6.0 / 2.0)
    assert found["model.layers.0.self_attn.o_proj"] == pytest.approx(8.0 / 2.0)


def test_the_digest_is_of_what_is_computed(reader: AdapterReader, model: torch.nn.Module, tmp_path: Path) -> None:
    first, same, other = (
        reader.read(str(make_adapter(tmp_path / name, model, seed=seed, lora_dropout=drop))).digest
        for name, seed, drop in (("a", 1, 0.1), ("b", 1, 0.0), ("c", 2, 0.1))
    )
    scaled = reader.read(str(change_adapter(tmp_path / "a", lora_alpha=7.0))).digest
    assert first == same
    assert len({first, other, scaled}) == 3


def test_names_of_older_files_and_of_models_without_a_head_are_known(
    reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    named = make_adapter(tmp_path / "named", model, middle=".default")
    bare = make_adapter(tmp_path / "bare", model)

    def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(f"{PREFIX}model.", PREFIX)] = tensors.pop(name)

    change_tensors(bare, without_prefix)
    assert reader.read(str(named)).digest == reader.read(str(bare)).digest


def test_the_first_pattern_counts_and_any_number_of_names_is_taken(
    reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    patterns = {f"model.layers.{layer}.self_attn.q_proj": 1.0 for layer in range(1, 6_000)}
    patterns |= {r".*\.layers\.(0|1)\.self_attn\.(q|k)_proj": 2.0, "k_proj": 3.0, "attn.v_proj": 4.0}
    make_adapter(tmp_path, model, rank=4, alpha=8.0, alpha_pattern=patterns)
    found = scales(reader.read(str(tmp_path)), reader, tmp_path)
    for layer, wanted in enumerate(({"q": 2.0, "k": 2.0, "v": 8.0}, {"q": 1.0, "k": 2.0, "v": 8.0})):
        for name, alpha in wanted.items():
            assert found[f"model.layers.{layer}.self_attn.{name}_proj"] == pytest.approx(alpha / 4)


SLOW = ("(?x:([a-z_.0-9]+) +)!", "(a+)+", "(.|.)" * 40 + "!", r"\\(.|.)" * 30, "[a-z.]*" * 4, "x" * 257)


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_could_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=r"too complex a pattern|has 257 characters"):
        read_peft_config({"r": 4, "lora_alpha": 4, "rank_pattern": {pattern: 8}})


def test_patterns_are_limited_in_number_and_names_in_length(
    reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, model, rank_pattern={rf"layers\.{layer}\.mlp": 4 for layer in range(65)})
    assert "rank_pattern has 65 regular expressions, the limit is 64" in refusal(reader, folder)
    change_adapter(folder, rank_pattern={})
    change_tensors(folder, lambda tensors: tensors.update({"a" * 600 + ".lora_A.weight": torch.zeros(4, 4)}))
    assert "has 614 characters, the limit is 512" in refusal(reader, folder)


REFUSED = {
    "use_dora": (True, "use_dora is set: DoRA is not supported"),
    "bias": ("lora_only", "bias is 'lora_only'"),
    "modules_to_save": (["lm_head"], "modules_to_save is set"),
    "peft_type": ("LOHA", "peft_type is 'LOHA'"),
    "fan_in_fan_out": (True, "fan_in_fan_out is True"),
    "init_lora_weights": ("pissa", "init_lora_weights is 'pissa'"),
    "target_parameters": ("experts.down_proj", "target_parameters must be a list of names"),
    "r": (0, "r must be a whole number above 0"),
    "lora_alpha": ("big", "lora_alpha must be a number"),
    "alpha_pattern ": ({"q_proj": 10**400}, "alpha_pattern.q_proj must be a number"),
    "rank_pattern": ({"(a+)+": 4}, "too complex a pattern"),
    "alpha_pattern": ({"(": 4}, "no regular expression"),
    "use_rslora": ("yes", "use_rslora must be true or false"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_is_not_computed_is_refused_by_name(
    key: str, reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    value, reason = REFUSED[key]
    assert reason in refusal(reader, change_adapter(make_adapter(tmp_path, model), **{key.strip(): value}))


TENSORS = {
    "model.layers.0.mlp.experts.3.down_proj.lora_A.weight": "the model has no such module",
    "model.layers.0.mlp.experts.base_layer.lora_A.weight": "the model has no such module",
    "model.embed_tokens.lora_embedding_A": "embeddings are not supported",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": "DoRA is not supported",
    "model.visual.blocks.0.attn.qkv.lora_A.weight": "vision towers are not supported",
    "model.layers.7.self_attn.q_proj.lora_A.weight": "the model has no such module",
    "model.layers.0.input_layernorm.lora_A.weight": "this layer of the model cannot be adapted",
    "model.norm.weight": "is no A or B of a LoRA adapter",
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_no_layer_takes_is_refused_by_name(
    name: str, reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[PREFIX + name] = torch.zeros(4, 48)
        if ".lora_A." in name:
            tensors[PREFIX + name.replace("_A.", "_B.")] = torch.zeros(48, 4)

    message = refusal(reader, change_tensors(make_adapter(tmp_path, model), add))
    assert TENSORS[name] in message
    assert name in message


def test_an_adapter_that_changes_nothing_is_refused(reader: AdapterReader, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {"peft_type": "LORA", "r": 4, "lora_alpha": 4}, {})
    assert "changes no module of the model" in refusal(reader, folder)


def test_ranks_and_shapes_are_checked(reader: AdapterReader, model: torch.nn.Module, tmp_path: Path) -> None:
    large = make_adapter(tmp_path / "large", model, rank=SMALL.max_rank + 1)
    assert "has rank 17, the limit is 16" in refusal(reader, large)
    other = change_adapter(make_adapter(tmp_path / "other", model, rank=4), r=8)
    assert "has shape [4, 48], the model and adapter_config.json say [8, 48]" in refusal(reader, other)
    side = f"{PREFIX}{QUERY}.lora_B.weight"
    lone = change_tensors(make_adapter(tmp_path / "lone", model), lambda tensors: tensors.pop(side))
    assert "is there without its B" in refusal(reader, lone)
    broken = make_adapter(tmp_path / "broken", model)
    change_tensors(broken, lambda tensors: tensors[side].fill_(float("inf")))
    assert "not finite" in refusal(reader, broken)


def test_pickles_and_empty_folders_are_refused(reader: AdapterReader, model: torch.nn.Module, tmp_path: Path) -> None:
    assert "the folder is not there; check the path" in refusal(reader, tmp_path / "nowhere")
    assert "adapter_config.json is not in the folder" in refusal(reader, tmp_path)
    make_adapter(tmp_path, model)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors is not in the folder" in refusal(reader, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    assert "save it again with safetensors" in refusal(reader, tmp_path)


class Overwriting(AdapterReader):
    """Another process writes to the file between its opening and the reading of its values."""

    def __init__(self, reader: AdapterReader, file: Path) -> None:
        vars(self).update(vars(reader))
        self._file = file

    def _read_file(self, *given: Any) -> HostAdapter:
        with self._file.open("r+b") as file:
            file.seek(-4_096, os.SEEK_END)
            file.write(bytes(4_096))
            file.truncate(self._file.stat().st_size // 2 if self._file.parent.name == "short" else None)
        return super()._read_file(*given)


@pytest.mark.parametrize("name", ["long", "short"])  # the first fails where the second would kill: it goes first
def test_writing_to_a_file_that_is_read_changes_nothing(
    name: str, reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / name, model)
    whole = reader.read(str(folder))
    found = Overwriting(reader, folder / "adapter_model.safetensors").read(str(folder))
    assert found.digest == whole.digest
    assert all(torch.equal(mine.b, other.b) for mine, other in zip(found.pairs, whole.pairs, strict=True))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_only_plain_files_of_a_possible_size_are_read(
    name: str, reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    file = make_adapter(tmp_path / "adapter", model) / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert f"{name}: cannot be read: it is a link" in refusal(reader, file.parent)
    file.unlink()
    with file.open("wb") as large:
        large.truncate(64 << 20)  # without any blocks on disk
    assert f"{name}: has 67108864 bytes, the limit is" in refusal(reader, file.parent)
    file.unlink()
    os.mkfifo(file)
    assert name in refusal(reader, file.parent)


def test_the_links_of_a_hugging_face_cache_are_followed(
    reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "snapshots" / "revision", model)
    digest = reader.read(str(folder)).digest
    (tmp_path / "blobs").mkdir()
    for file in list(folder.iterdir()):
        file.rename(tmp_path / "blobs" / f"hash-{file.name}")
        file.symlink_to(f"../../blobs/hash-{file.name}")
    assert reader.read(str(folder)).digest == digest


def test_code_that_fails_at_an_adapter_refuses_it(
    reader: AdapterReader,
    model: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(AdapterReader, "_read_file", lambda *given: 1 / 0)
    assert "reading the adapter failed with ZeroDivisionError" in refusal(reader, make_adapter(tmp_path, model))
    assert "Traceback" in caplog.text


def test_two_spellings_of_one_module_are_refused(reader: AdapterReader, model: torch.nn.Module, tmp_path: Path) -> None:
    def spell_twice(tensors: dict[str, torch.Tensor]) -> None:
        for side in "AB":
            stored = tensors[f"{PREFIX}{QUERY}.lora_{side}.weight"]
            tensors[f"{PREFIX}{QUERY.removeprefix('model.')}.lora_{side}.weight"] = stored * 2

    message = refusal(reader, change_tensors(make_adapter(tmp_path, model), spell_twice))
    assert f"{PREFIX}{QUERY}.lora_A.weight" in message
    assert "are of the same module" in message


@pytest.mark.parametrize("alpha", [1e42, 1e300])
def test_values_that_are_too_large_for_the_dtype_are_refused(
    alpha: float, reader: AdapterReader, model: torch.nn.Module, tmp_path: Path
) -> None:
    message = refusal(reader, make_adapter(tmp_path, model, alpha=alpha))
    assert "lora_B.weight: values are not finite in float32" in message
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.double() * 1e200 for name, tensor in load_file(file).items()}, file)
    assert "lora_A.weight: values are not finite in float32" in refusal(reader, tmp_path)
