"""Phi-3 against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from family_bench import BACKENDS, PROMPTS, SIZES, check_parity, hf_checkpoint, hf_model, logits_of

transformers = pytest.importorskip("transformers")


def config(original: int, **changes: object) -> object:
    """Heads of 16 numbers; frequencies change past `original` tokens."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": original, **factors}
    more = {"original_max_position_embeddings": original, "rope_parameters": rope}
    return transformers.Phi3Config(**(SIZES | more | changes))


@pytest.mark.parametrize("attention", BACKENDS)
def test_phi3_before_its_frequencies_change(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, config(40, sliding_window=7)), attention=attention)


@pytest.mark.parametrize("attention", ["reference", "auto", "triton"])
def test_long_prompts_have_frequencies_of_their_own(attention: str, tmp_path: Path) -> None:
    """A prompt is rotated by its whole length, later tokens by theirs, as transformers does."""
    model = hf_model(config(8))
    model.save_pretrained(tmp_path)
    ((_, found),) = logits_of(tmp_path, PROMPTS[:1], attention=attention, halves=False)
    tokens = list(PROMPTS[0])
    for logits in found:
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)
        tokens.append(int(logits.argmax()))


def test_phi3_without_scaling(tmp_path: Path) -> None:
    check_parity(
        hf_checkpoint(tmp_path, config(64, rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
        attention="auto",
    )


@pytest.mark.parametrize("attention", ["reference", "auto", "triton"])
def test_phi4_mini_turns_a_part_of_each_head(attention: str, tmp_path: Path) -> None:
    changed = config(40)
    changed.rope_parameters |= {  # type: ignore[attr-defined]
        "partial_rotary_factor": 0.75, "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0] * 6,
    }  # fmt: skip
    check_parity(hf_checkpoint(tmp_path, changed), attention=attention)
