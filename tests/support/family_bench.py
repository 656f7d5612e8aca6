"""Tiny random models that transformers writes to disk, read back by Quire's own loading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import HAS_TRITON
from quire.kernels.native.loader import why_not_native
from quire.runtime.layers.blocks import Blocks
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, engine_config, greedy_reference
from window_bench import WindowBench, groups_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
BACKENDS = [
    "reference",
    "gather",
    "auto",
    pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="no triton")),
]
NO_PROGRAM = "the program runs on a CPU" if DEVICE != "cpu" else why_not_native(torch.float32, torch.device("cpu"))
PROMPTS = ([5, 9, 2, 11, 7, 3, 8, 1, 30, 12], [4, 4, 17])
NUM_DECODED = 4


def hf_model(hf_config: Any, seed: int = 0) -> torch.nn.Module:
    """A model of random weights, norms and biases too."""
    import transformers

    if hf_config.model_type == "mistral4":  # published within Mistral 3's class, so that AutoModel does not know it
        hf_config.dtype = torch.float32
        return randomize(transformers.Mistral4ForCausalLM(hf_config).eval(), seed)
    has_vision = hasattr(hf_config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
    return randomize(auto.from_config(hf_config, dtype=torch.float32).eval(), seed)


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            is_norm = value.dim() == 1  # or a bias; weights of norms are about one, or zero where one is added
            value.normal_(float(value.mean().round()) if is_norm else 0.0, 0.15, generator=generator)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.normal_(0.0, 0.5, generator=generator)
    return model


def hf_checkpoint(folder: Path, hf_config: Any, seed: int = 0) -> Path:
    """A folder as `save_pretrained` writes it."""
    hf_model(hf_config, seed).save_pretrained(folder)
    return folder


def load_bench(path: Path, *, attention: str = "auto", split: bool = False, **config: Any) -> Bench:
    """split: layers with a window have blocks of their own, and blocks that nobody holds are full of NaN."""
    checkpoint = open_checkpoint(files_at(path))
    if split:
        config["groups"] = groups_of(checkpoint.config)
        return WindowBench(checkpoint, engine_config(**config), attention=attention)  # type: ignore[arg-type]
    return Bench(checkpoint, engine_config(**config), attention=attention)  # type: ignore[arg-type]


def needs_program() -> None:
    """Skip the rest of a test on a device, or in a build, without the compiled CPU path."""
    if NO_PROGRAM is not None:
        pytest.skip(NO_PROGRAM)


def num_calls(bench: Bench) -> int:
    """Operations of the traced program that are not compiled. Skips the test where there is no program."""
    needs_program()
    model: Any = bench.worker._runner._model
    model.trace(bench.worker.cache.layers)
    blocks = next(module for module in model.modules() if isinstance(module, Blocks))
    (program,) = blocks._programs.values()
    return program.num_calls


def change_config(path: Path, **changes: Any) -> None:
    """Write other settings into the folder's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def logits_of(
    path: Path,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    attention: str = "auto",
    halves: bool = True,
    **config: Any,
) -> list[tuple[list[int], Tensor]]:
    """For each prompt the tokens that Quire decodes, and the logits they came from [NUM_DECODED, vocab].

    The first prompt comes in two chunks (`halves`), the others beside its second; then all rows decode together.
    """
    bench = load_bench(path, attention=attention, **config)
    for row, prompt in enumerate(prompts):
        bench.add(row, prompt)
    first, *others = prompts
    half = len(first) // 2 if halves else 0
    if half:
        bench.run(chunks=[Chunk(0, 0, half)])
    rest = [Chunk(row, 0, len(prompt), (row,)) for row, prompt in enumerate(others, 1)]
    bench.run(chunks=[Chunk(0, half, len(first) - half, (0,)), *rest])
    for _ in range(NUM_DECODED - 1):
        bench.run(decode=list(range(len(prompts))))
    seen = bench.sampler.seen
    return [(bench.tokens[row][len(prompt) :], torch.stack(seen[row])) for row, prompt in enumerate(prompts)]


def check_parity(
    path: Path, *, attention: str, model: torch.nn.Module | None = None, atol: float = 2e-4, **config: Any
) -> None:
    """Quire's tokens and logits are those of transformers, whose model is read from `path` too unless it is given."""
    import transformers

    if model is None:
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, (tokens, logits) in zip(PROMPTS, logits_of(path, attention=attention, **config), strict=True):
        wanted, wanted_logits = greedy_reference(model, prompt, NUM_DECODED)
        assert tokens == wanted
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-3, atol=atol)
