"""Plain decoders whose layers have windows, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from family_bench import BACKENDS, SIZES, check_parity, hf_checkpoint

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("attention", BACKENDS)
def test_mistral_with_a_window(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, transformers.MistralConfig(**SIZES, sliding_window=6)), attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config"])
def test_qwen_with_windows_in_its_later_layers(kind: str, attention: str, tmp_path: Path) -> None:
    some = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    more = {"head_dim": 16} if kind == "Qwen3Config" else {}
    check_parity(hf_checkpoint(tmp_path, getattr(transformers, kind)(**SIZES, **some, **more)), attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
def test_granite(attention: str, tmp_path: Path) -> None:
    factors = {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
    }  # fmt: skip
    check_parity(hf_checkpoint(tmp_path, transformers.GraniteConfig(**SIZES, **factors)), attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
def test_smollm3_has_layers_without_positions(attention: str, tmp_path: Path) -> None:
    some = {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5}
    check_parity(hf_checkpoint(tmp_path, transformers.SmolLM3Config(**(SIZES | some))), attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
def test_olmo2_norms_after_its_layers(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, transformers.Olmo2Config(**SIZES)), attention=attention)
