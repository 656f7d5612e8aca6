"""Families whose layers reorder or expand their matrices answer with quantized ones as with their numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_bench import hf_model, load_bench
from family_models import settings_of
from quire.runtime.loading.hf.config import hf_model_config
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
    "nemotron_h-moe": {"hybrid_override_pattern": "ME*"},
    "gemma4_text-moe": {  # the keys of the last layer are its values
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
UNREAD = {  # what published checkpoints bring once more in a third layer, and nobody reads there
    "gemma4_text": r"\.layers\.1\.self_attn\.[kv]_",
    "deepseek_v3": r"\.layers\.1\.",  # it drafts tokens
}
PLAIN = ("embed", "lm_head", "norm", "gate.weight", "router")  # what tools leave as it is


def quantized_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """A checkpoint with int8 matrices, and one with their numbers."""
    settings = settings_of(family, LAYERS.get(family, {"num_hidden_layers": 2}))
    model = hf_model(transformers.AutoConfig.for_model(family.partition("-")[0], **settings))
    plain, small = folder / "plain", folder / "small"
    for path in (plain, small):
        model.save_pretrained(path)
    numbers = load_file(plain / "model.safetensors")
    own = [name for name in numbers if re.search(UNREAD.get(family, "$^"), name)]
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


def held(folder: Path) -> dict[str, int]:
    """How many weights of each matrix in a folder the layers hold."""
    numbers = {name: math.prod(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in numbers if ".k_proj." in name and name.replace("k_proj", "v_proj") not in numbers]:
        numbers[name.replace("k_proj", "v_proj")] = numbers[name]
    return numbers


@pytest.mark.parametrize(("family", "copied"), [("deepseek_v3", 0), ("gemma4_text", 0), ("gemma4_text-moe", 1)])
def test_the_config_counts_the_matrices_that_layers_hold(family: str, copied: int, tmp_path: Path) -> None:
    """Those that nobody reads are not counted, keys that are values too twice; `kv_b_proj` and matrices without groups
    of 32 are held as numbers."""
    small, plain = quantized_pair(tmp_path, family)
    shapes, stored = held(plain), load_file(small / "model.safetensors")
    assert len(shapes) - len(load_file(plain / "model.safetensors")) == copied
    unread = UNREAD.get(family, "$^").replace("1", "2")
    read = {name: size for name, size in shapes.items() if not re.search(unread, name)}
    matrices = {name: name if name in stored else name.replace("v_proj", "k_proj") for name in read}
    quantized = [name for name, source in matrices.items() if f"{source}_scale" in stored and "kv_b_proj" not in name]
    levels = [name for name in quantized if stored[matrices[name]].shape[1] % 32 == 0]
    config = hf_model_config(small)
    assert config.num_parameters == sum(read.values())
    assert config.levels.parameters == sum(read[name] for name in levels)


@pytest.mark.parametrize("attention", ["reference", "auto"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_neox", "phi3", "gemma4_text", "nemotron_h-moe"])
def test_logits_are_those_of_the_numbers(family: str, attention: str, tmp_path: Path) -> None:
    small, plain = quantized_pair(tmp_path, family)
    names = [name for name in load_file(small / "model.safetensors") if name.endswith("_scale")]
    assert any(".experts." in name for name in names) == (family in ("mixtral", "deepseek_v3", "nemotron_h-moe"))
    wanted = last_logits(plain, "reference")
    found = last_logits(small, attention)
    assert float((found - wanted).abs().max() / wanted.std()) < 5e-3
