"""LoRA adapters of routed experts as PEFT saves them, made by hand for tiny models, and the models that they would be
merged into. See adapter_files for all other modules."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adapter_files import PREFIX, make_adapter, merged, write_adapter

Form = Literal["each", "fused", "old"]  # modules of every expert; parameters of all; those of PEFT before 0.19
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Parameter(NamedTuple):
    """The matrices of all experts of a layer, as transformers holds them."""

    module: str  # of the experts
    name: str
    value: Tensor
    transposed: bool  # [experts, inputs, outputs]
    in_turns: bool  # outputs of gate and up

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, inputs, outputs."""
        experts, first, second = self.value.shape
        return (experts, first, second) if self.transposed else (experts, second, first)

    def rows(self, part: str) -> slice:
        """The outputs of one of an expert's matrices."""
        if self.name != "gate_up_proj":
            return slice(None)
        second, half = part == "up_proj", self.sizes[2] // 2
        return slice(int(second), None, 2) if self.in_turns else slice(second * half, (second + 1) * half)

    def add(self, expert: int, outputs: slice, change: Tensor) -> None:
        """change [outputs, inputs]"""
        mine = self.value.data[expert].t() if self.transposed else self.value.data[expert]
        mine[outputs] += change


def expert_parameters(model: nn.Module) -> Iterator[Parameter]:
    for path, value in model.named_parameters():
        module, _, name = path.rpartition(".")
        if module.endswith(".experts") and name in ("gate_up_proj", "up_proj", "down_proj"):
            is_gpt_oss = "GptOss" in type(model).__name__
            yield Parameter(module, name, value, is_gpt_oss, is_gpt_oss)


def make_expert_adapter(
    folder: Path, model: nn.Module, form: Form, *, rank: int = 4, seed: int = 0, others: bool = True,
    only: Callable[[str, int], bool] = lambda name, expert: True, dtype: torch.dtype = torch.float32, **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter of routed experts, and with `others` of all linear modules too; return its folder. `only`: by
    the name of a parameter and the number of an expert. Tensors of experts have the ranks that `rank_pattern` says."""
    make_adapter(folder, model, rank=rank, seed=seed + 100, only=lambda _: others, **config)
    tensors, settings = load_file(folder / "adapter_model.safetensors"), _settings(folder)
    generator = torch.Generator().manual_seed(seed)
    is_mixtral = "Mixtral" in type(model).__name__
    for parameter in expert_parameters(model):
        experts, inputs, outputs = parameter.sizes
        module = parameter.module.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else parameter.module
        if form == "each":
            parts = ["gate_proj", "up_proj"] if parameter.name == "gate_up_proj" else [parameter.name]
            for expert, part in ((e, p) for e in range(experts) for p in parts if only(p, e)):
                name = f"{PREFIX}{module}.{expert}.{_MIXTRAL[part] if is_mixtral else part}"
                mine = _pattern(settings, "rank_pattern", name, rank)
                a = torch.randn(mine, inputs, generator=generator) * inputs**-0.5
                b = torch.randn(outputs // len(parts), mine, generator=generator) * 0.3
                tensors |= {f"{name}.lora_A.weight": a.to(dtype), f"{name}.lora_B.weight": b.to(dtype)}
        elif only(parameter.name, 0):
            if form == "old" and not parameter.transposed:
                inputs, outputs = outputs, inputs
            mine = _pattern(settings, "rank_pattern", f"{parameter.module}.{parameter.name}", rank)
            a = torch.randn(experts * mine, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, mine * experts, generator=generator) * 0.3
            is_inner = parameter.name != "down_proj" and only("down_proj", 0)  # PEFT wraps it first
            name = f"{PREFIX}{parameter.module}{'.base_layer' if is_inner else ''}"
            tensors |= {f"{name}.lora_A.weight": a.to(dtype), f"{name}.lora_B.weight": b.to(dtype)}
    if form != "each":
        places = ((each.module.split(".")[-2], each.name) for each in expert_parameters(model))
        targets = list(dict.fromkeys(f"{parent}.experts.{name}" for parent, name in places))
        settings |= {"target_parameters": targets, "peft_version": "0.18.1" if form == "old" else "0.21.2"}
    return write_adapter(folder, settings, tensors)


def merged_experts(model: nn.Module, folder: Path) -> nn.Module:
    """A copy of the model with the adapter's changes in its weights: those of experts as PEFT's `get_delta_weight`."""
    tensors, settings = load_file(folder / "adapter_model.safetensors"), _settings(folder)
    of_experts = {name: value for name, value in tensors.items() if ".experts." in name}
    plain = write_adapter(folder / "plain", settings, {k: v for k, v in tensors.items() if k not in of_experts})
    result = merged(copy.deepcopy(model), plain)
    parameters = {(each.module, each.name): each for each in expert_parameters(result)}
    for name, a in of_experts.items():
        if ".lora_A." in name:
            path, b = name.removeprefix(PREFIX).partition(".lora_A.")[0], of_experts[name.replace("lora_A", "lora_B")]
            _merge(parameters, path, a.float(), b.float(), settings)
    return result


def _merge(parameters: dict[tuple[str, str], Parameter], path: str, a: Tensor, b: Tensor, settings: Any) -> None:
    module, _, rest = f"{path}.".partition(".experts.")
    module, rest = module.replace("block_sparse_moe", "mlp") + ".experts", rest.removesuffix(".")
    if rest and rest != "base_layer":
        expert, _, name = rest.partition(".")
        part = next((part for part, short in _MIXTRAL.items() if short == name), name)
        parameter = parameters[module, part if (module, part) in parameters else "gate_up_proj"]
        parameter.add(int(expert), parameter.rows(part), _scale(settings, path, len(a)) * b @ a)
        return
    for name in [each for parent, each in parameters if parent == module]:
        parameter = parameters[module, name]
        experts, inputs, outputs = parameter.sizes
        is_old = settings["peft_version"] < "0.19" and not parameter.transposed
        if (a.shape[1], b.shape[0]) != ((outputs, inputs) if is_old else (inputs, outputs)):
            continue
        b = b * _scale(settings, f"{module}.{name}", len(a) // experts)
        delta = torch.einsum("ore,eri->eoi", b.reshape(len(b), -1, experts), a.reshape(experts, -1, a.shape[1]))
        for expert, change in enumerate(delta):
            parameter.add(expert, slice(None), change.t() if is_old else change)


def _scale(settings: Any, name: str, rank: int) -> float:
    alpha = _pattern(settings, "alpha_pattern", name, settings["lora_alpha"])
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def _pattern(settings: Any, key: str, name: str, usual: Any) -> Any:
    """The number of the first pattern that fits the end of a name, as PEFT's `get_pattern_key` finds it."""
    fitting = (value for pattern, value in settings.get(key, {}).items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(fitting, usual)


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return settings
