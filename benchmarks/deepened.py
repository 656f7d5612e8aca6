"""Makes a model deeper by layers that change little. The result is a large model for which the small one, with its
tokenizer, can draft."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.cpu.export import export_hugging_face

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# The matrices whose outputs are added to the residual stream.
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def deepen(model: str | None, folder: Path, times: int, noise: float) -> Path:
    """Write a model with `times` as many layers to `folder`. After each layer come copies of it whose outputs are
    multiplied by `noise`: with 0 the deep model computes exactly the same as the model."""
    export_hugging_face(model, folder, "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    save_file(deepened(tensors, times, noise), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] *= times
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def deepened(tensors: dict[str, Tensor], times: int, noise: float) -> dict[str, Tensor]:
    """Return the tensors of the deep model."""
    found = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        layer, part = int(match[1]), match[2]
        for copy in range(times):
            scaled = copy > 0 and part in _OUTPUTS
            found[f"model.layers.{times * layer + copy}.{part}"] = tensor * noise if scaled else tensor.clone()
    return found
