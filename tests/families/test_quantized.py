"""Families whose layers reorder or expand their matrices answer with quantized ones as with their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_bench import hf_model, load_bench
from family_models import COMMON, CONFIGS
from quire.types.step import Chunk

TOKENS = [5, 9, 2, 11, 7, 3]
SCHEME = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    }},
}  # fmt: skip
LAYERS: dict[str, dict[str, object]] = {  # of families that need more than two
    "gemma4_text": {  # the last layer reads the keys and values of the second
        "num_hidden_layers": 3, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip
PLAIN = ("embed", "lm_head", "norm", "gate.weight")  # what tools leave as it is


def quantized_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """A checkpoint with int8 matrices, and one with their numbers."""
    settings = {key: value for key, value in (COMMON | CONFIGS[family]).items() if value is not ...}
    model = hf_model(
        transformers.AutoConfig.for_model(family, **settings | LAYERS.get(family, {"num_hidden_layers": 2}))
    )
    plain, small = folder / "plain", folder / "small"
    for path in (plain, small):
        model.save_pretrained(path)
    numbers = load_file(plain / "model.safetensors")
    if family == "gemma4_text":  # published checkpoints bring matrices of the last layer too, which nobody reads
        own = [name for name in numbers if ".layers.1.self_attn.k_" in name or ".layers.1.self_attn.v_" in name]
        numbers |= {name.replace(".layers.1.", ".layers.2."): numbers[name].clone() for name in own}
    stored = dict(numbers)
    for name, weight in numbers.items():
        if weight.dim() != 2 or not name.endswith(".weight") or any(word in name for word in PLAIN):
            continue
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).half().float()
        levels = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        stored[name], stored[f"{name}_scale"] = levels, scale
        numbers[name] = levels.float() * scale
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, small / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    return small, plain


def last_logits(folder: Path, attention: str) -> torch.Tensor:
    bench = load_bench(folder, attention=attention)
    bench.add(0, TOKENS)
    bench.run((), (Chunk(0, 0, len(TOKENS), (0,)),))
    found: torch.Tensor = bench.sampler.seen[0][0]
    return found


@pytest.mark.parametrize("attention", ["reference", "auto"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_neox", "phi3", "gemma4_text"])
def test_logits_are_those_of_the_numbers(family: str, attention: str, tmp_path: Path) -> None:
    small, plain = quantized_pair(tmp_path, family)
    names = [name for name in load_file(small / "model.safetensors") if name.endswith("_scale")]
    assert any(".experts." in name for name in names) == (family in ("mixtral", "deepseek_v3"))
    wanted = last_logits(plain, "reference")
    found = last_logits(small, attention)
    assert float((found - wanted).abs().max() / wanted.std()) < 5e-3
