"""gpt-oss against transformers: how its files store experts, and what its config says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from family_bench import SIZES, change_config, check_parity, hf_checkpoint, hf_model, load_bench, logits_of, num_calls
from gguf_files import Stored, stored, write_gguf
from interpreter import HAS_TRITON
from quire.kernels.native.ops import has_tile_units
from quire.runtime.layers.stacked_experts import ExpertLinear
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.models.gpt_oss import GPT_OSS, SHIFT
from quire.runtime.quantization.mxfp4 import Mxfp4Weight
from quire.types.errors import ModelLoadError
from tiny_models import DEVICE

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
BACKENDS = ["reference", "auto", *(["triton"] if HAS_TRITON else [])]
ROPE = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 5_000.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SMALL = SIZES | {"intermediate_size": 64, "head_dim": 16, "sliding_window": 6, "rope_parameters": ROPE}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def gpt_oss(**changes: Any) -> Any:
    return transformers.GptOssConfig(**(SMALL | {"num_local_experts": 5, "num_experts_per_tok": 3} | changes))


def packed_checkpoint(folder: Path, **sizes: int) -> torch.nn.Module:
    """A folder as gpt-oss is published: experts as random MXFP4. Returns the model of the same numbers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = hf_model(gpt_oss(**sizes))
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = value
                continue
            num, inputs, outputs = value.shape
            shape = (num, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            value.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    model.config.save_pretrained(folder)
    safetensors.save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=MXFP4)
    return model


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_checkpoint_of_mxfp4_gives_what_transformers_makes_of_it(attention: str, tmp_path: Path) -> None:
    model = packed_checkpoint(tmp_path)
    check_parity(tmp_path, attention=attention, model=model)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_of_a_gpu_hold_mxfp4_as_it_is_stored(tmp_path: Path) -> None:
    from quire.kernels.triton.grouped_w4 import W4Stack

    packed_checkpoint(tmp_path)
    model: Any = load_bench(tmp_path, attention="triton").worker._runner._model
    stacks = [layer.stack for layer in model.modules() if isinstance(layer, ExpertLinear)]
    assert len(stacks) == 2 * hf_model_config(tmp_path).num_layers
    assert all(isinstance(stack, W4Stack) and stack.has_codes for stack in stacks)
    levels, held = hf_model_config(tmp_path).levels, sum(each.data.nbytes + each.scales.nbytes for each in stacks)
    assert levels.gpu_parameters == sum(5 * each.outputs * each.inputs for each in stacks)
    assert held <= levels.gpu_bytes < held * 1.1


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_codes_of_a_hopper_gpu_give_what_transformers_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading, placing and summing as on such a GPU, with the kernel itself in plain PyTorch."""
    from coded_reference import reference_product
    from quire.kernels.cuda import coded_experts
    from quire.runtime.layers import expert_gemms

    calls: list[bool] = []

    def product(*given: Any, **options: Any) -> Any:
        calls.append("activation" in options)
        return reference_product(*given, **options)

    model = packed_checkpoint(tmp_path, hidden_size=128, num_hidden_layers=1)
    monkeypatch.setenv("QUIRE_CODED_EXPERTS", "1")
    monkeypatch.setattr(coded_experts, "runs_on", lambda _: True)
    takes = expert_gemms.takes_codes
    monkeypatch.setattr(expert_gemms, "takes_codes", lambda e, _, **options: takes(e, torch.bfloat16, **options))
    monkeypatch.setattr(expert_gemms, "coded_gemm", product)
    check_parity(tmp_path, attention="triton", model=model)
    assert calls[:2] == [True, False]


def test_mxfp4_runs_as_a_program_and_in_bfloat16_where_the_config_is_silent(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    assert num_calls(load_bench(tmp_path)) == 0
    change_config(tmp_path, dtype=None)
    assert hf_model_config(tmp_path).dtype == "bfloat16"


def test_mxfp4_is_what_the_format_says() -> None:
    """Sign, two bits of exponent, one of mantissa; the lower half of a byte comes first."""

    def entry(bits: int) -> float:
        exponent, half = bits >> 1 & 3, bits & 1
        size = 0.5 * half if exponent == 0 else (1 + 0.5 * half) * 2.0 ** (exponent - 1)
        return -size if bits & 8 else size

    blocks = torch.randint(0, 256, (3, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    exponents = torch.tensor([[127, 0], [1, 130], [254, 100]], dtype=torch.uint8)
    found = Mxfp4Weight(blocks, exponents).values()
    assert found.shape == (3, 64)
    for row in range(3):
        for column in range(64):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            wanted = entry(byte >> 4 if column % 2 else byte & 15) * 2.0 ** (int(exponents[row, column // 32]) - 127)
            assert found[row, column].item() == torch.tensor(wanted, dtype=torch.float32).item()
    assert Mxfp4Weight(blocks[:1], exponents[:1] * 0 + 255).values().isnan().all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "is there without"),
        (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), "not finite"),
        (lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, :3]}), "none of MXFP4"),
        (lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"].float()}), "has dtype F32"),
        (lambda tensors, name: tensors[f"{name}_blocks"][1].zero_(), "are zero"),
        (lambda tensors, name: tensors.update({f"{name}_blocks": tensors[f"{name}_blocks"][:4]}), "5 experts"),
        (lambda tensors, name: tensors.update({name: torch.ones(5, 64, 32)}), "is the same tensor as"),
        (lambda tensors, name: tensors.pop(f"{name}_blocks"), "is missing"),
        (lambda tensors, name: tensors.update({f"{name}_bias": torch.ones(5, 31)}), "has shape"),
    ],
)
def test_damaged_experts_are_refused(change: Callable[..., Any], named: str, tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.down_proj")
    safetensors.save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=named):
        load_bench(tmp_path)


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_bfloat16_is_near_float32(attention: str, tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, gpt_oss(hidden_size=64))
    wanted = logits_of(tmp_path, attention="reference")
    found = logits_of(tmp_path, attention=attention, dtype="bfloat16")
    for (_, logits), (_, near) in zip(wanted, found, strict=True):
        torch.testing.assert_close(near[0], logits[0], rtol=0.05, atol=0.25)
    if attention == "auto" and DEVICE == "cpu" and has_tile_units():
        assert num_calls(load_bench(tmp_path, dtype="bfloat16")) == 0


def test_layers_say_how_many_weights_there_are(tmp_path: Path) -> None:
    model = hf_model(gpt_oss())
    model.save_pretrained(tmp_path)
    config = hf_model_config(tmp_path)
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())
    stacked = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
    assert config.num_active == config.num_parameters - stacked // 5 * 2


def test_what_gpt_oss_takes_for_granted_is_what_transformers_does(tmp_path: Path) -> None:
    theirs = transformers.GptOssConfig(num_hidden_layers=3)
    theirs.save_pretrained(tmp_path)
    said = hf_model_config(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    silent = {key: value for key, value in values.items() if key in (*kept, "num_hidden_layers", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps(silent))
    config = hf_model_config(tmp_path)
    assert config == said
    assert config.windows == (128, None, 128)
    assert config.rope.theta == 150_000.0
    assert dict(config.rope.scaling)["truncate"] == 0.0
    assert config.experts is not None
    assert config.experts.clamp == (theirs.swiglu_limit, theirs.swiglu_alpha, SHIFT)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    gpt_oss().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=named):
        hf_model_config(tmp_path)


def gguf_tensors(model: torch.nn.Module, kind: str) -> list[Stored]:
    assert GPT_OSS.gguf is not None
    inner = {hf: gguf for gguf, hf in GPT_OSS.gguf.inner.items()}
    outer = {hf: gguf for gguf, hf in GPT_OSS.gguf.outer.items()}
    found = []
    for name, value in model.state_dict().items():
        if not name.startswith("model.layers."):
            found.append(stored(outer[name], value.numpy()))
            continue
        _, _, number, rest = name.split(".", 3)
        if rest.startswith("mlp.experts."):
            word = rest.removeprefix("mlp.experts.").removesuffix("_bias")
            ending = "bias" if rest.endswith("_bias") else "weight"
            whole = value if ending == "bias" else value.transpose(1, 2)
            parts = {"gate": whole[:, 0::2], "up": whole[:, 1::2]} if word == "gate_up_proj" else {"down": whole}
            for part, numbers in parts.items():
                used = "F32" if ending == "bias" else kind
                found.append(stored(f"blk.{number}.ffn_{part}_exps.{ending}", numbers.contiguous().numpy(), used))
        elif rest == "self_attn.sinks":
            found.append(stored(f"blk.{number}.attn_sinks.weight", value.numpy()))
        elif rest == "post_attention_layernorm.weight":
            found.append(stored(f"blk.{number}.post_attention_norm.weight", value.numpy()))
        else:
            path, _, ending = rest.rpartition(".")
            found.append(stored(f"blk.{number}.{inner[path]}.{ending}", value.numpy()))
    return found


SETTINGS = {
    "context_length": 128, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16, "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 6, "expert_count": 5, "expert_used_count": 3,
    "expert_feed_forward_length": 64, "rope.freq_base": 5_000.0, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}  # fmt: skip


def gguf_file(path: Path, model: torch.nn.Module, kind: str = "F32", **changes: Any) -> Path:
    settings = {f"gpt-oss.{key}": value for key, value in (SETTINGS | changes).items()}
    return write_gguf(path, {"general.architecture": "gpt-oss", **settings}, gguf_tensors(model, kind))


@pytest.mark.parametrize("attention", BACKENDS)
def test_gpt_oss_in_gguf(attention: str, tmp_path: Path) -> None:
    model = hf_model(gpt_oss())
    check_parity(gguf_file(tmp_path / "m.gguf", model), attention=attention, model=model)


def test_experts_of_a_gguf_are_multiplied_as_levels(tmp_path: Path) -> None:
    model = hf_model(gpt_oss())
    bench = load_bench(gguf_file(tmp_path / "m.gguf", model, "Q8_0"))
    assert num_calls(bench) == 0
    plain = logits_of(gguf_file(tmp_path / "p.gguf", model))
    for (_, near), (_, logits) in zip(logits_of(tmp_path / "m.gguf"), plain, strict=True):
        torch.testing.assert_close(near[0], logits[0], rtol=0.05, atol=0.1)


def test_a_gguf_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", hf_model(gpt_oss()), expert_count=4)
    with pytest.raises(ModelLoadError, match="there are 4 experts"):
        load_bench(path)
