"""The default model as a mixture of equal experts, with its real weights, gives the default model's tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from devices import DEVICE
from parity_prompts import LONG, SHORT
from quire import LLM, SamplingParams

pytestmark = pytest.mark.model

WHOLE = os.environ.get("QUIRE_TEST_WHOLE") == "1"
NUM, USED = 4, 2
NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def upcycle(dense: Path, directory: Path) -> Path:
    """Every MLP becomes NUM equal experts behind a random router, whose weights add up to one."""
    config = json.loads((dense / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": NUM, "num_experts_per_tok": USED}
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for name, tensor in load_file(dense / "model.safetensors").items():
        block, _, mlp = name.partition(".mlp.")
        if not mlp:
            tensors[name] = tensor
            continue
        matrix = NAMES[mlp.removesuffix(".weight")]
        for expert in range(NUM):
            tensors[f"{block}.block_sparse_moe.experts.{expert}.{matrix}.weight"] = tensor.clone()
    for layer in range(config["num_hidden_layers"]):
        router = torch.randn(NUM, config["hidden_size"], generator=generator)
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").write_bytes((dense / "tokenizer.json").read_bytes())
    return directory


@pytest.mark.skipif(not WHOLE, reason="long: `make parity` runs it")
def test_the_default_model_as_equal_experts_gives_its_own_tokens(smollm2_hf: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    answers = []
    for path in (smollm2_hf, upcycle(smollm2_hf, tmp_path / "mixture")):
        with LLM(str(path), dtype="float32", device=DEVICE, verbose=False, max_model_len=2048) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate([*SHORT, *LONG], greedy)])
    dense, mixture = answers
    assert mixture == dense
