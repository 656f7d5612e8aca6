"""Steps whose chunks attend by a kernel that norms and rotates their queries give the tokens and logits of the
reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from adapter_files import SMALL, make_adapter
from quire.config.model import QUERY_SCALE, Heads, Rope
from quire.kernels.triton.launch import has_gluon
from quire.runtime.attention import registry
from quire.runtime.attention.prefill_scratch import ScratchConfig
from quire.runtime.attention.triton import TritonAttention
from quire.runtime.worker import forward_graphs, parts
from quire.types.step import Chunk
from rotating_prefill import RotatingPrefill
from tiny_models import (
    DEVICE,
    Bench,
    checkpoint_of,
    compare_steps,
    engine_config,
    family_checkpoint,
    mix_steps,
    tiny_config,
    transformers_model,
)

on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU may have the kernel itself")
on_hopper = pytest.mark.skipif(not has_gluon(torch.device(DEVICE)), reason="the kernel is for Hopper GPUs")
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(4, 2, 16)}
PARTIAL = Heads(4, 2, 32)


@pytest.fixture(autouse=True)
def capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> RotatingPrefill:
    return RotatingPrefill(monkeypatch)


def compare(config: Any) -> None:
    source = family_checkpoint(config)
    plain, deferred = (
        mix_steps(Bench(source, engine_config(max_len=64), attention=kind)) for kind in ("reference", "triton")
    )
    compare_steps(deferred, plain, within=1e-4)


@on_cpu
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3", {"heads": PARTIAL, "rope": Rope(dim=16)}),
        ("llama", {"num_layers": 2, "windows": (7, None)}),
        ("llama", {"num_layers": 2, "kv_layers": (0, 0)}),
    ],
    ids=["no norm", "norm", "part of a head", "window", "keys of another layer"],
)
def test_queries_of_chunks_are_left_to_their_attention(
    architecture: str, changes: dict[str, Any], kernel: RotatingPrefill
) -> None:
    compare(tiny_config(architecture, **(SIZES | changes)))
    assert kernel.rotaries
    assert None not in kernel.rotaries


@on_cpu
@pytest.mark.parametrize(
    "changes",
    [
        {"heads": PARTIAL, "rope": Rope(dim=8)},
        {"rope": Rope(scaling=((QUERY_SCALE, 0.5), ("original_max_position_embeddings", 8)))},
    ],
    ids=["few rotated elements", "queries scaled by position"],
)
def test_other_queries_are_rotated_before(changes: dict[str, Any], kernel: RotatingPrefill) -> None:
    compare(tiny_config("llama", **(SIZES | changes)))
    assert set(kernel.rotaries) == {None}


@on_cpu
def test_queries_that_a_lora_adapter_changes_are_rotated_before(tmp_path: Path, kernel: RotatingPrefill) -> None:
    config = tiny_config("qwen3", **SIZES)
    model = transformers_model(config)
    folder, source = make_adapter(tmp_path / "one", model, seed=1, rank=4), checkpoint_of(model, config)
    benches = []
    for kind in ("reference", "triton"):
        bench = Bench(source, engine_config(max_len=64, adapters=SMALL), attention=kind)
        bench.put_adapter(0, folder)
        bench.add(5, [5, 9, 2, 11], adapter=0)
        bench.run(chunks=[Chunk(5, 0, 4, (5,))])
        benches.append(bench)
    compare_steps(*reversed(benches), within=1e-4)
    assert set(kernel.rotaries) == {None}


@on_hopper
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", {"heads": Heads(4, 2, 64)}),
        ("llama", {"heads": Heads(6, 2, 128)}),
        ("llama", {"heads": Heads(4, 4, 96)}),
        ("llama", {"heads": Heads(4, 2, 128), "rope": Rope(dim=64)}),
        ("qwen3", {"heads": Heads(4, 2, 128), "windows": (None, 7)}),
        ("llama", {"heads": Heads(4, 2, 64), "kv_layers": (0, 0)}),
    ],
    ids=["norm", "no norm", "two slabs", "part of a head", "window", "keys of another layer"],
)
def test_the_kernel_for_hopper_gpus_gives_what_queries_rotated_before_give(
    architecture: str, changes: dict[str, Any], kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By graphs, with decodes beside chunks. Chunks over a float8 cache attend over a dequantized copy, where they see
    more than a window."""
    from quire.kernels.triton import attention_hopper

    monkeypatch.setattr(registry, "prefill_scratch", lambda *_: ScratchConfig(torch.bfloat16, least_rows=4, page=8))
    monkeypatch.setattr(parts, "scratch_tokens", lambda *_: 64)
    launch, rotaries = attention_hopper.hopper_prefill, list[object]()

    def watched(*given: Any, rotary: object = None, **more: Any) -> None:
        rotaries.append(rotary)
        launch(*given, rotary=rotary, **more)

    monkeypatch.setattr(attention_hopper, "hopper_prefill", watched)
    source = family_checkpoint(tiny_config(architecture, **(SIZES | {"num_layers": 2} | changes)))
    config = engine_config(max_len=64, block_size=16, dtype="bfloat16", kv_dtype=kv_dtype)
    deferred = mix_steps(Bench(source, config, attention="triton"))
    assert rotaries
    assert None not in rotaries
    monkeypatch.setattr(TritonAttention, "defer_rotary", lambda self, query, cache, plan, *_: plan)
    rotaries.clear()
    before = mix_steps(Bench(source, config, attention="triton"))
    assert set(rotaries) == {None}
    compare_steps(deferred, before)
