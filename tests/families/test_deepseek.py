"""DeepSeek V2 and V3 against transformers: what their flags add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import BACKENDS, SIZES, change_config, check_parity, hf_checkpoint, hf_model, load_bench, logits_of
from quire.config.memory import kv_block_bytes
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program_run import Program
from quire.runtime.layers.blocks import Blocks
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import DEVICE
from worker_executor import TinyEngine

transformers = pytest.importorskip("transformers")
SMALL = SIZES | {
    "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "q_lora_rank": None, "moe_intermediate_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


def v2(**changes: Any) -> Any:
    return transformers.DeepseekV2Config(**(SMALL | {"n_shared_experts": 2} | changes))


def v3(**changes: Any) -> Any:
    return transformers.DeepseekV3Config(**(SMALL | {"n_group": 3, "topk_group": 1, "n_shared_experts": 1} | changes))


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_bias_ranks_experts_and_does_not_weigh_them(attention: str, tmp_path: Path) -> None:
    model = hf_model(v3(n_group=2, topk_group=1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.normal_(0.0, 0.5, generator=generator)
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention=attention, model=model)


@pytest.mark.parametrize(
    "config",
    [
        v2(rope_parameters=YARN),
        v2(q_lora_rank=10, routed_scaling_factor=3.0, first_k_dense_replace=0),
        v2(topk_method="group_limited_greedy", n_group=3, topk_group=2),
        v3(rope_parameters=YARN, q_lora_rank=10),
        v3(rope_interleave=False, norm_topk_prob=False),
        v3(tie_word_embeddings=True, n_group=1, topk_group=1),
    ],
)
def test_other_forms(tmp_path: Path, config: Any) -> None:
    check_parity(hf_checkpoint(tmp_path, config), attention="auto")


@pytest.mark.skipif(REFUSAL is not None or DEVICE != "cpu", reason=str(REFUSAL or "runs on a CPU"))
@pytest.mark.parametrize("rank", [64, 48])  # tile units take multiples of 32, where there are some
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_gives_what_its_blocks_give(
    dtype: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    folder = hf_checkpoint(tmp_path, v2(**sizes, first_k_dense_replace=2))
    program = logits_of(folder, dtype=dtype)
    plain = logits_of(folder, dtype=dtype, attention="reference")
    for (_, found), (_, want) in zip(program, plain, strict=True):
        torch.testing.assert_close(found[0], want[0], rtol=0.0, atol=1e-4 if dtype == "float32" else 0.1)
    monkeypatch.setattr(Blocks, "_run_program", Blocks._run_layers)
    monkeypatch.delattr(Program, "run")
    for (_, found), (_, want) in zip(program, logits_of(folder, dtype=dtype), strict=True):
        assert torch.equal(found, want)


def test_a_token_leaves_one_vector_in_each_layer(tmp_path: Path) -> None:
    bench = load_bench(hf_checkpoint(tmp_path, v3()))
    cache, config = bench.worker.cache, open_checkpoint(files_at(tmp_path)).config
    assert [spec.kind for spec in config.kv_specs] == ["latent", "latent"]
    assert kv_block_bytes(config, "float32", 4) == 2 * 4 * (16 + 4) * 4
    assert cache.blocks.shape[0] == 2
    layer = cache.layers[1]
    assert layer.key.shape[1:] == (1, cache.block_size, 20)
    assert layer.value.shape[1:] == (1, cache.block_size, 16)
    assert layer.value.data_ptr() == layer.key.data_ptr()
    cache.check()


def test_layers_past_the_last_are_left_out(tmp_path: Path) -> None:
    """Checkpoints hold layers that draft tokens."""
    model = hf_model(v3())
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.input_layernorm.weight": torch.ones(32)}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_parity(tmp_path, attention="auto", model=model)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (v2, "attention_bias", True),
        (v2, "norm_topk_prob", True),
        (v2, "num_key_value_heads", 1),
        (v2, "topk_method", "random"),
        (v2, "scoring_func", "sigmoid"),
        (v3, "topk_method", "greedy"),
        (v3, "scoring_func", "softmax"),
        (v3, "n_group", 4),
        (v3, "topk_group", 4),
        (v3, "moe_layer_freq", 0),
        (v3, "qk_rope_head_dim", 3),
        (v3, "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
)
def test_what_would_change_the_output_is_refused(tmp_path: Path, config: Any, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match="n_group" if key == "topk_group" else key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.skipif(REFUSAL is not None or DEVICE != "cpu", reason=str(REFUSAL or "runs on a CPU"))
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["float32", "float8"])
def test_a_crowd_gets_the_logprobs_of_lone_requests_to_the_bit(kv_dtype: str, tensor: int, tmp_path: Path) -> None:
    """Whatever shares the batch, and however prompts are cut: a last bit would be enough for another float8 value."""
    checkpoint = open_checkpoint(files_at(hf_checkpoint(tmp_path, v3(q_lora_rank=10))))
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, SIZES["vocab_size"], (4 + 7 * i,), generator=generator).tolist() for i in range(6)]
    given: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 5, "logprobs": 0}
    crowd = TinyEngine(checkpoint, tensor=tensor, kv_dtype=kv_dtype, block_size=3, budget=11)
    lone = TinyEngine(checkpoint, tensor=tensor, kv_dtype=kv_dtype, block_size=16)
    for i, prompt in enumerate(prompts):
        crowd.submit(f"{i}", prompt, **given)
    crowd.run()
    for i, prompt in enumerate(prompts):
        lone.submit(f"{i}", prompt, **given)
        lone.run()
        (found,), (expected,) = crowd.finished[f"{i}"].samples, lone.finished[f"{i}"].samples
        assert found.token_ids == expected.token_ids
        assert found.cumulative_logprob == expected.cumulative_logprob
