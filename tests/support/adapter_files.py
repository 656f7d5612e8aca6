"""LoRA adapters as PEFT saves them, made by hand for tiny models, and the models that they would be merged into."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config.adapters import AdapterConfig

PREFIX = "base_model.model."
SMALL = AdapterConfig(slots=3, max_rank=16, host_adapters=4)
# Modules of transformers' models that are linear, and that no adapter of ours changes.
LEFT_OUT = ("experts", "kv_b_proj", "per_layer_model_projection", "visual")


def linear_modules(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the modules that adapters may change, by name."""
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_transposed = type(module).__name__ == "Conv1D"
        if (isinstance(module, nn.Linear) or is_transposed) and not any(word in name for word in LEFT_OUT):
            outputs, inputs = weight.shape[::-1] if is_transposed else weight.shape
            found[name] = (inputs, outputs)
    return found


def make_adapter(
    folder: Path,
    model: nn.Module,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    only: Callable[[str], bool] = lambda name: True,
    ranks: Mapping[str, int] | None = None,  # of modules with another rank
    middle: str = "",  # what stands before `.weight`, as ".default"
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter of all linear modules, or of some, and return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in linear_modules(model).items():
        if not only(name) or ".indexer." in name:  # whose weights are not read
            continue
        mine = (ranks or {}).get(name, rank)
        a = torch.randn(mine, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, mine, generator=generator) * 0.3
        tensors[f"{PREFIX}{name}.lora_A{middle}.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{name}.lora_B{middle}.weight"] = b.to(dtype)
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "lora_dropout": 0.1,
        "fan_in_fan_out": any(type(module).__name__ == "Conv1D" for module in model.modules()),
        "rank_pattern": dict(ranks or {}), "target_modules": ["q_proj"], "init_lora_weights": True,
    }  # fmt: skip
    return write_adapter(folder, settings | config, tensors)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def change_adapter(folder: Path, **changes: Any) -> Path:
    """Write other settings into the folder's config."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def merged(model: nn.Module, folder: Path) -> nn.Module:
    """A copy of the model with the adapter's changes in its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    result = copy.deepcopy(model)
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        path, b = name.removeprefix(PREFIX).partition(".lora_A.")[0], tensors[name.replace(".lora_A.", ".lora_B.")]
        rank = len(a)
        alpha = config.get("alpha_pattern", {}).get(path, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        module = result.get_submodule(path)
        if path == "lm_head":  # it may be the embedding, which stays as it is
            module.weight = nn.Parameter(module.weight.data.clone())  # type: ignore[operator,union-attr]
        change = scale * b.float() @ a.float()
        weight: Tensor = module.weight  # type: ignore[assignment]
        weight.data += change.T if type(module).__name__ == "Conv1D" else change
    return result
