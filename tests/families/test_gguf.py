"""GGUF files of every family: the weights of its Hugging Face checkpoint, and transformers' tokens."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from family_models import FamilyCase
from gguf_families import LAYOUTS, family_metadata, family_tensors, gguf_case, plus_one, write_family
from gguf_files import Stored, write_gguf
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.models.registry import ENTRIES
from quire.runtime.quantization.region import Region
from quire.types.errors import ModelLoadError
from tests.families.features import check, prompts_of
from tiny_models import MemoryCheckpoint
from worker_executor import TinyEngine

OWN_TESTS = {  # in test_gemma, test_gemma3n, test_gemma4, test_gpt_oss, test_gguf_layouts and test_gguf_encoders
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss",
    "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bert",
}  # fmt: skip
NOT_SAID = ("weights", "levels", "dtype", "rope")  # fields of a config that files say in another way


@pytest.fixture(params=sorted(LAYOUTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(name: str, tmp_path: Path) -> FamilyCase:
    return gguf_case(name, tmp_path / "hf")


def opened(tmp_path: Path, name: str, case: FamilyCase, kind: str = "F32") -> Checkpoint:
    return open_checkpoint(files_at(write_family(tmp_path / f"{kind}.gguf", name, case, kind)))


def test_every_family_in_gguf_is_compared() -> None:
    read = {family for family, entry in ENTRIES.items() if entry.in_gguf}
    assert read == OWN_TESTS | {name.partition("-")[0] for name in LAYOUTS}


def test_config_and_weights_are_those_of_the_hugging_face_checkpoint(
    name: str, case: FamilyCase, tmp_path: Path
) -> None:
    theirs, ours = case.checkpoint(), opened(tmp_path, name, case)
    for each in fields(theirs.config):
        if each.name not in NOT_SAID:
            assert getattr(ours.config, each.name) == getattr(theirs.config, each.name), each.name
    length = ours.config.rope.max_position  # Falcon's is not that of config.json
    mine, other = ours.config.rope, replace(theirs.config.rope, max_position=length)
    assert (mine.kind, mine.theta, mine.dim) == (other.kind, other.theta, other.dim)
    assert (mine.frequency_factors, mine.long_factors) == (other.frequency_factors, other.long_factors)
    assert dict(mine.scaling) == pytest.approx(dict(other.scaling))
    assert ours.names == theirs.names
    is_turned = LAYOUTS[name].turn is plus_one  # a norm's weight plus one, minus one
    for tensor in ours.names:
        atol = 1e-6 if is_turned or tensor.endswith("A_log") else 0.0  # whose exponent is stored
        torch.testing.assert_close(ours.read(tensor), theirs.read(tensor), rtol=0.0, atol=atol, msg=tensor)


def test_tokens_are_those_of_transformers(name: str, case: FamilyCase, tmp_path: Path) -> None:
    made = TinyEngine(opened(tmp_path, name, case))  # type: ignore[arg-type]
    check(case, made, prompts_of(case))


def test_quantized_rows_come_in_the_order_of_the_layers(name: str, case: FamilyCase, tmp_path: Path) -> None:
    checkpoint, compared = opened(tmp_path, name, case, "Q8_0"), 0
    for tensor in sorted(checkpoint.names):
        shape = checkpoint.shape(tensor)
        whole = checkpoint.read_quantized(tensor) if len(shape) == 2 else None
        if whole is None:
            continue
        values, compared = checkpoint.read(tensor), compared + 1
        assert torch.equal(whole.values(), values), tensor
        half = Region(range(shape[0] // 2, shape[0]), range(shape[1] // 2, shape[1]))
        part = checkpoint.read_quantized(tensor, half)
        if part is not None and part.shape != shape:  # else blocks cannot be cut there
            assert torch.equal(part.values(), values[shape[0] // 2 :, shape[1] // 2 :]), tensor
    assert compared > 0 or checkpoint.config.architecture == "gpt2"  # whose matrices are turned, and so dequantized


def test_quantized_files_give_the_tokens_of_their_dequantized_weights(
    name: str, case: FamilyCase, tmp_path: Path
) -> None:
    stored, prompts = opened(tmp_path, name, case, "Q8_0"), prompts_of(case)
    floats = MemoryCheckpoint(stored.config, {tensor: stored.read(tensor) for tensor in stored.names})
    found = TinyEngine(stored, cpu_weights="float").answers(prompts, max_tokens=6)  # type: ignore[arg-type]
    assert found == TinyEngine(floats, cpu_weights="float").answers(prompts, max_tokens=6)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    case = gguf_case("mixtral", tmp_path / "hf")
    path = write_family(tmp_path / "m.gguf", "mixtral", case)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_xx_exps.weight"))
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_xx_exps\.weight: has no place in a mixtral model"):
        open_checkpoint(files_at(path))


def test_experts_that_old_files_store_apart_are_read(tmp_path: Path) -> None:
    case = gguf_case("mixtral", tmp_path / "hf")
    layout = LAYOUTS["mixtral"]
    tensors = list[Stored]()
    for tensor in family_tensors(layout, case, "F32"):
        if not tensor.name.endswith("_exps.weight"):
            tensors.append(tensor)
            continue
        count, *shape = tensor.shape
        size, name = len(tensor.data) // count, tensor.name.replace("_exps.weight", "")
        tensors += [
            Stored(f"{name}.{expert}.weight", tuple(shape), tensor.type_number, tensor.data[expert * size :][:size])
            for expert in range(count)
        ]
    theirs = case.checkpoint()
    ours = open_checkpoint(files_at(write_gguf(tmp_path / "m.gguf", family_metadata(layout, case), tensors)))
    assert ours.names == theirs.names
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.names)
