"""Plain decoders whose layers have windows, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from family_bench import BACKENDS, COMMON, check_parity, hf_checkpoint

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("attention", BACKENDS)
def test_mistral_with_a_window(attention: str, tmp_path: Path) -> None:
    model = hf_checkpoint(tmp_path, transformers.MistralConfig(**COMMON, sliding_window=6))
    check_parity(tmp_path, model, attention)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config"])
def test_qwen_with_windows_in_its_later_layers(kind: str, attention: str, tmp_path: Path) -> None:
    some = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    more = {"head_dim": 16} if kind == "Qwen3Config" else {}
    model = hf_checkpoint(tmp_path, getattr(transformers, kind)(**COMMON, **some, **more))
    check_parity(tmp_path, model, attention)
