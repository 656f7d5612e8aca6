"""Weights quantized while loading, and float8 blocks: Triton's products give the logits of the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from make_quantized import FIXTURES, TOKENS
from quire.config.model import CpuWeights, Heads
from quire.kernels.native.loader import why_not_native
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import TYPE_BY_NAME
from quire.runtime.quantization.levels import LevelWeight
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "heads": Heads(4, 2, 16)}


@cache
def plain() -> MemoryCheckpoint:
    return random_checkpoint(tiny_config("qwen2", num_layers=1, qkv_bias=True, **SIZES))


def logits(bench: Bench) -> Tensor:
    """After a prompt, and after the step of one token behind it."""
    bench.add(0, TOKENS)
    bench.run((), (Chunk(0, 0, len(TOKENS), (0,)),))
    bench.tokens[0][-1] = 3
    bench.worker.rows.tokens[0, len(bench.tokens[0]) - 1] = 3
    bench.run((0,))
    return torch.stack(bench.sampler.seen[0])


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).pow(2).mean().sqrt() / wanted.std())


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # padding rows hold whatever was there before
@pytest.mark.parametrize(("quantization", "near"), [("int4", 0.01), ("int8", 0.05)])
def test_weights_quantized_while_loading_give_the_logits_of_the_reference(quantization: str, near: float) -> None:
    pytest.importorskip("triton")
    config = engine_config(quantization=quantization)  # type: ignore[arg-type]
    wanted = logits(Bench(plain(), config, attention="reference"))
    assert error(logits(Bench(plain(), config, attention="triton")), wanted) < near
    assert 1e-3 < error(wanted, logits(Bench(plain(), engine_config(), attention="reference"))) < 0.5


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("name", ["ct-fp8-block", "ct-w8a8"])
def test_quantized_checkpoints_give_the_logits_of_the_reference(name: str) -> None:
    pytest.importorskip("triton")
    import triton_cases  # noqa: F401  float8 as hardware rounds it

    checkpoint = open_checkpoint(files_at(FIXTURES / name))
    wanted, found = (
        logits(Bench(checkpoint, engine_config(), attention=attention))  # type: ignore[arg-type]
        for attention in ("reference", "triton")
    )
    assert error(found, wanted) < 0.1  # a row alone is not rounded there


@pytest.mark.parametrize("attention", ["reference", "auto"])
@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
def test_only_the_row_with_nan_fails(quantization: str | None, attention: str) -> None:
    """One token's vector is NaN: its row's logits are, and no other's."""
    source = plain()
    tensors = {name: tensor.clone() for name, tensor in source.tensors.items()}
    tensors["model.embed_tokens.weight"][7] = float("nan")
    bench = Bench(
        MemoryCheckpoint(source.config, tensors),
        engine_config(quantization=quantization),  # type: ignore[arg-type]
        attention=attention,
    )
    bench.add(0, [3, 5, 9])
    bench.add(1, [3, 7, 9])
    bench.run((), (Chunk(0, 0, 3, (0,)), Chunk(1, 0, 3, (1,))))
    assert bench.sampler.seen[0][0].isfinite().all()
    assert bench.sampler.seen[1][0].isnan().all()


@dataclass
class GgufMix(MemoryCheckpoint):
    """The types of a Q4_K_M file: values and down projections in Q6_K, the rest of a block in Q4_K."""

    levels: dict[str, LevelWeight] = field(default_factory=dict)

    def read_quantized(self, name: str, region: Any = None) -> LevelWeight | None:
        return self.levels.get(name)


@cache
def gguf_mix() -> tuple[GgufMix, MemoryCheckpoint]:
    """As levels, and the same as numbers."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "heads": Heads(4, 2, 64)}
    source = random_checkpoint(tiny_config("llama", num_layers=1, **wide))
    levels = {}
    for name, tensor in source.tensors.items():
        if "_proj" not in name:
            continue
        kind = TYPE_BY_NAME["Q6_K" if "v_proj" in name or "down_proj" in name else "Q4_K"]
        generator = torch.Generator().manual_seed(len(levels))
        blocks = torch.randint(0, 256, (tensor.numel() // 256, kind.block_bytes), generator=generator).to(torch.uint8)
        places, size = ((208,), 2e-5) if kind.name == "Q6_K" else ((0, 2), 1e-4)
        for place in places:
            blocks[:, place : place + 2] = torch.full((len(blocks), 1), size).half().view(torch.uint8)
        found = read_levels(blocks.view(-1), kind, tuple(tensor.shape))
        assert found is not None
        levels[name] = found
    numbers = source.tensors | {name: weight.values() for name, weight in levels.items()}
    return GgufMix(source.config, source.tensors, levels=levels), MemoryCheckpoint(source.config, numbers)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize(
    ("attention", "cpu_weights", "near"),
    [("triton", "float", 2e-3), ("auto", "integer", 0.05), ("auto", "integer16", 2e-3), ("auto", "float", 0.01)],
)
def test_the_types_of_a_q4_k_m_file_are_multiplied_without_expansion(
    attention: str, cpu_weights: CpuWeights, near: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of 8 bits ("integer") change the logits by some hundredths. Without integer products, the native kernels
    hold groups of 16 with one scale for 32."""
    if attention == "triton":
        pytest.importorskip("triton")
    quantized, numbers = gguf_mix()
    wanted = logits(Bench(numbers, engine_config(), attention="reference"))
    with caplog.at_level("INFO", logger="quire.runtime"):
        config = engine_config()
        device = replace(config.device, cpu_weights=cpu_weights)
        found = logits(Bench(quantized, replace(config, device=device), attention=attention))
    assert error(found, wanted) < near
    is_expanded = attention == "auto" and DEVICE == "cpu" and why_not_native(torch.float32, CPU) is not None
    assert ("expanded" in caplog.text) == is_expanded
