"""Checkpoints with quantized matrices, and adapters, over ranks: each rank holds its part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapter_files import SMALL, make_adapter
from family_models import FamilyCase
from gguf_files import tiny_weights, write_tiny_gguf
from make_quantized import FIXTURES
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf import checkpoint as gguf_checkpoint
from quire.runtime.loading.gguf.types import TYPE_BY_NAME
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.quantization.region import Region
from worker_executor import TinyEngine

PROMPTS = ([3, 17, 42, 5, 60, 11, 29, 8], [4, 4, 17])
STORED = sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").exists())
# These round activations by the largest one of a token, or of a group that ranks cut: each rank by its own.
ROUNDED = {"ct-fp8-block", "ct-fp8-dynamic", "ct-w8a8"}
NAMED = [3, 17, 42]


def answers(path: Path, max_tokens: int = 8, adapter: str = "", **settings: Any) -> tuple[list[Any], Any]:
    """Tokens, and at each place the logprobs of NAMED."""
    engine = TinyEngine(open_checkpoint(files_at(path)), **settings)  # type: ignore[arg-type]
    if adapter:
        engine.core.adapters.load("small", adapter)
    name = "small" if adapter else ""
    found = engine.answers(PROMPTS, logprob_token_ids=NAMED, max_tokens=max_tokens, adapter=name)
    engine.executor.close()
    entries = sorted(engine.logprobs, key=lambda each: each[0])
    return found, np.array([entry.logprobs[-len(NAMED) :] for _, entry in entries])


def check_same(path: Path, within: float = 1e-4, **settings: Any) -> None:
    (alone, numbers), (shared, others) = answers(path, **settings), answers(path, tensor=2, **settings)
    assert shared == alone
    np.testing.assert_allclose(others, numbers, atol=within)


@pytest.mark.parametrize("attention", ["gather", "auto"])
@pytest.mark.parametrize("name", [name for name in STORED if name not in ROUNDED])
def test_ranks_hold_parts_of_quantized_matrices(name: str, attention: str) -> None:
    # one rank rounds the numbers of nf4 and fp4 to 8-bit levels, and a part that is cut within a block is expanded
    check_same(FIXTURES / name, within=2e-3 if "4" in name and name.startswith("bnb") else 1e-4, attention=attention)


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_ranks_round_their_own_activations(name: str) -> None:
    (_, numbers), (_, others) = answers(FIXTURES / name, max_tokens=1), answers(FIXTURES / name, 1, tensor=2)
    np.testing.assert_allclose(others, numbers, atol=0.2)


@pytest.mark.parametrize("tensor", [2, 4])
def test_matrices_of_a_gguf_file_are_cut_in_whole_groups_or_expanded(tmp_path: Path, tensor: int) -> None:
    weights = {name: item * 0.2 for name, item in tiny_weights().items()}
    kinds = {name: "Q8_0" for name, item in weights.items() if item.ndim == 2}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weights, kinds)
    assert answers(path, tensor=tensor)[0] == answers(path)[0]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_are_quantized_while_each_rank_loads_its_part(quantization: str) -> None:
    path = FIXTURES / "gptq-4bit"
    (alone, numbers), (shared, others) = (
        answers(path, 1, quantization=quantization, tensor=tensor) for tensor in (1, 2)
    )
    assert len(shared) == len(alone)
    np.testing.assert_allclose(others, numbers, atol=0.2)


@pytest.mark.parametrize("attention", ["gather", "auto"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_adapters_are_cut_like_the_layers_they_change(tmp_path: Path, family: str, attention: str) -> None:
    pytest.importorskip("transformers")
    case = FamilyCase(family, tmp_path / "model")
    folder = str(make_adapter(tmp_path / "adapter", case.model, fan_in_fan_out=family == "gpt2"))
    case.checkpoint().close()
    without, _ = answers(case.directory, attention=attention, adapters=SMALL)
    settings: dict[str, Any] = {"attention": attention, "adapters": SMALL, "adapter": folder}
    check_same(case.directory, **settings)
    assert answers(case.directory, **settings)[0] != without


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("own", [range(32), range(32, 64), range(8, 40)])
def test_some_inputs_of_a_quantized_matrix_have_the_same_values(name: str, own: range) -> None:
    checkpoint = open_checkpoint(files_at(FIXTURES / name))
    weight = checkpoint.read_quantized("model.layers.0.self_attn.o_proj.weight")
    assert weight is not None
    cut = weight.inputs(own)
    if cut is not None:  # else it is expanded
        torch.testing.assert_close(cut.values(), weight.values()[:, own.start : own.stop], rtol=0, atol=0)
    assert cut is not None or own.start % 32 or "act-order" in name


REGIONS = [Region(range(32, 64), range(64)), Region(range(64), range(32, 64)), Region(range(32), range(32))]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", STORED)
def test_a_region_of_a_quantized_matrix_is_read_without_the_rest(
    name: str, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, matrix = open_checkpoint(files_at(FIXTURES / name)), "model.layers.0.self_attn.o_proj.weight"
    assert isinstance(checkpoint, HfCheckpoint)
    assert checkpoint._method is not None
    read, given = checkpoint._method.read, []
    monkeypatch.setattr(
        checkpoint._method, "read", lambda layer, tensors: given.append(tensors) or read(layer, tensors)
    )
    whole, found = checkpoint.read_quantized(matrix), checkpoint.read_quantized(matrix, region)
    assert whole is not None
    assert found is not None
    if found.shape == whole.shape:  # it cuts what is stored as one
        is_one = name.startswith("bnb") or "3bit" in name or ("act-order" in name and len(region.inputs) < 64)
        assert is_one or found.group > 32
        return
    (outputs, inputs), values = (region.outputs, region.inputs), whole.values()
    wanted = values[outputs.start : outputs.stop, inputs.start : inputs.stop]
    assert torch.equal(found.values(), wanted)
    levels = [max(tensor.nbytes for tensor in tensors.values()) for tensors in given]
    assert levels[1] * values.numel() == levels[0] * wanted.numel()


def test_a_region_of_a_gguf_matrix_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and key rows in their order too."""
    weights, size = {name: item * 0.2 for name, item in tiny_weights().items()}, TYPE_BY_NAME["Q8_0"].block_values
    kinds = {name: "Q8_0" for name, item in weights.items() if item.ndim == 2}
    checkpoint = open_checkpoint(files_at(write_tiny_gguf(tmp_path / "tiny.gguf", weights, kinds)))
    counts: list[int] = []
    read = gguf_checkpoint.read_levels
    monkeypatch.setattr(gguf_checkpoint, "read_levels", lambda raw, *rest: counts.append(len(raw)) or read(raw, *rest))
    for name in sorted(checkpoint.names):
        whole = checkpoint.read_quantized(name) if len(checkpoint.shape(name)) == 2 else None
        if whole is None:
            continue
        outputs, inputs = whole.shape
        for region in (Region(range(outputs // 2, outputs), range(inputs)), Region(range(outputs), range(size))):
            if region.shape == whole.shape:
                continue
            counts.clear()
            part = checkpoint.read_quantized(name, region)
            assert part is not None
            assert counts == [part.levels.numel() // size * TYPE_BY_NAME["Q8_0"].block_bytes]
            rows, columns = region.outputs, region.inputs
            wanted = whole.values()[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(part.values(), wanted)
