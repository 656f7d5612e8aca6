"""BLOOM, MPT and Falcon RW against transformers: biases of scores in place of positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import change_config, check_parity, hf_checkpoint, logits_of
from quire.config.model import Alibi
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")


def bloom(**changes: Any) -> Any:
    return transformers.BloomConfig(**{"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, **changes})


def mpt(inner: dict[str, Any] | None = None, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 128, **changes}
    return transformers.MptConfig(**sizes, attn_config=inner or {})


@pytest.mark.parametrize("heads", [1, 2, 6, 12])
def test_heads_that_are_no_power_of_two_have_the_slopes_of_transformers(tmp_path: Path, heads: int) -> None:
    check_parity(hf_checkpoint(tmp_path / "bloom", bloom(n_head=heads)), attention="auto")
    check_parity(hf_checkpoint(tmp_path / "mpt", mpt({"softmax_scale": 0.2}, n_heads=heads)), attention="auto")


def test_slopes_are_those_of_the_paper(tmp_path: Path) -> None:
    found = open_checkpoint(files_at(hf_checkpoint(tmp_path, mpt({"alibi_bias_max": 16})))).config.alibi
    assert found == Alibi(most=16)  # which transformers ignores, and MPT's own code does not
    assert found.slopes(2) == [2.0**-8, 2.0**-16]
    assert Alibi().slopes(8) == [2.0**-power for power in range(1, 9)]
    assert Alibi(factor=0.5).slopes(3) == pytest.approx([2.0**-5, 2.0**-9, 2.0**-3])


def test_a_bloom_checkpoint_of_the_stack_alone_is_the_same_model(tmp_path: Path) -> None:
    wanted = logits_of(hf_checkpoint(tmp_path, bloom()))
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    for (_, found), (_, want) in zip(logits_of(tmp_path), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_bias", False),
        ("logit_scale", 0.5),
        ("norm_type", "rmsnorm"),
        ("attn_config", {"alibi": False}),
        ("attn_config", {"attn_type": "multiquery_attention"}),
        ("attn_config", {"qk_ln": True}),
        ("attn_config", {"prefix_lm": True}),
        ("attn_config", {"clip_qkv": -1.0}),
        ("attn_config", []),
    ],
)
def test_what_mpt_does_not_support_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    change_config(hf_checkpoint(tmp_path, mpt()), **{key: value})
    inner = next(iter(value)) if isinstance(value, dict) else ""
    with pytest.raises(ModelLoadError, match=f"{key}.?{inner}"):
        open_checkpoint(files_at(tmp_path))


def test_what_bloom_does_not_support_is_refused(tmp_path: Path) -> None:
    key = "apply_residual_connection_post_layernorm"
    change_config(hf_checkpoint(tmp_path, bloom()), **{key: True})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
