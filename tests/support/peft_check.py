"""Holds the reading of adapters against PEFT itself: python tests/support/peft_check.py

PEFT is no dependency of the tests. Run this by hand, where it is installed, after a change of how adapters are read:
PEFT wraps tiny models, saves adapters, and must compute the logits that Quire does.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import interpreter  # noqa: F401  before any kernel
from adapter_files import SMALL
from family_models import FamilyCase
from quire.types.step import Chunk
from tiny_models import Bench, engine_config

PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 9}},
    "qwen2": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "alpha_pattern": {"v_proj": 5}},
    "gpt2": {"target_modules": ["c_attn", "c_fc", "c_proj"]},
    "falcon": {"target_modules": ["query_key_value", "dense"]},
    "mixtral": {"target_modules": "all-linear"},  # PEFT makes parameters of the experts' modules
    "qwen3_moe": {"target_modules": ["q_proj"], "target_parameters": list(PARAMETERS), "use_rslora": True},
    "qwen2_moe": {"target_modules": ["shared_expert_gate"], "target_parameters": [*PARAMETERS, "mlp.gate.weight"]},
    "deepseek_v3": {"target_modules": ["o_proj"], "target_parameters": [*PARAMETERS, "gate.weight"]},
    "gpt_oss": {
        "target_modules": [],
        "target_parameters": [*PARAMETERS, "router.weight"],
        "rank_pattern": {"down_proj": 3, "router.weight": 2},
    },
}
PROMPT = [5, 9, 2, 11, 7, 3]


def check(name: str, folder: Path) -> float:
    """The largest difference between PEFT's logits and ours, of the last token of a prompt."""
    import peft

    case = FamilyCase(name, folder / "model")
    checkpoint = case.checkpoint()
    wrapped = peft.get_peft_model(case.model, peft.LoraConfig(r=6, lora_alpha=11, **SETTINGS[name]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, value in wrapped.named_parameters():
            if "lora_B" in parameter:
                value.normal_(0.0, 0.3, generator=generator)
        wrapped.save_pretrained(folder / "adapter")
        wanted = wrapped.eval()(torch.tensor([PROMPT])).logits[0, -1]
    bench = Bench(checkpoint, engine_config(adapters=replace(SMALL, experts=True)))  # type: ignore[arg-type]
    bench.put_adapter(0, folder / "adapter")
    bench.add(0, PROMPT, adapter=0)
    bench.run(chunks=[Chunk(0, 0, len(PROMPT), (0,))])
    return float((bench.sampler.seen[0][0] - wanted).abs().max())


def main() -> None:
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {check(name, Path(folder)):.1e}")


if __name__ == "__main__":
    main()
