"""The types that a Q4_K_M file gives to its matrices, and what the command refuses."""

from __future__ import annotations

import pytest

from benchmarks.quantized_models import k_m_type, main


def test_half_of_the_values_and_down_projections_get_more_bits() -> None:
    names = [f"blk.{layer}.ffn_down.weight" for layer in range(32)]
    larger = [layer for layer, name in enumerate(names) if k_m_type(name, 1536, 32) == "Q6_K"]
    assert larger == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert k_m_type("blk.0.attn_v.weight", 1024, 32) == "Q6_K"
    assert k_m_type("blk.0.attn_q.weight", 1024, 32) == "Q4_K"
    assert k_m_type("token_embd.weight", 1024, 32) == "Q6_K"


def test_rows_that_blocks_of_256_do_not_divide_get_the_next_larger_type() -> None:
    assert k_m_type("blk.0.attn_q.weight", 576, 30) == "Q5_0"
    assert k_m_type("blk.0.attn_v.weight", 576, 30) == "Q8_0"
    assert k_m_type("token_embd.weight", 576, 30) == "Q8_0"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("q3", "unknown kind q3"),
        ("q4_k_m", "q4_k_m needs --llama-library"),
        ("gptq", "gptq and awq need --text"),
    ],
)
def test_what_is_missing_is_named(kind: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "x.gguf", "--output", "y", "--kind", kind])
    assert message in capsys.readouterr().err
