"""Mixtures of experts over ranks that have whole experts: the tokens of transformers, by either form of the sum."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from family_models import FamilyCase
from interpreter import HAS_TRITON
from quire.runtime.parallel import expert_sum
from worker_executor import TinyEngine

pytest.importorskip("transformers")
WHOLE = "QUIRE_TEST_WHOLE" in os.environ  # make families
CHANGES: dict[str, dict[str, Any]] = {  # numbers of experts that two ranks cannot share evenly
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {"num_experts": 3},
    "qwen3_moe": {"num_experts": 7},
    "deepseek_v2": {"n_routed_experts": 9, "n_group": 3},
    "deepseek_v3": {"n_routed_experts": 9, "n_group": 3},
    "gemma4_text-moe": {"num_experts": 5},
    "glm4_moe": {"n_routed_experts": 9, "n_group": 3},
    "granitemoeshared": {"num_local_experts": 5},
    "minimax_m2": {"num_local_experts": 7},
    "nemotron_h-moe": {"n_routed_experts": 9, "n_group": 3},
    "ernie4_5_moe": {"moe_num_experts": 7},
    "llama4_text": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 5},
    "qwen3_next": {"num_experts": 5},
    "qwen3_5_moe_text": {"num_experts": 3},
}
WITHOUT_SHARED = ("mixtral", "qwen3_moe", "gpt_oss")


def check(case: FamilyCase, num_tokens: int = 12, tensor: int = 2, **settings: Any) -> TinyEngine:
    prompts = [case.prompt(20, 1), case.prompt(5, 2)]
    engine = TinyEngine(case.checkpoint(), tensor=tensor, expert=True, **settings)  # type: ignore[arg-type]
    found = engine.answers(prompts, max_tokens=num_tokens)
    engine.executor.close()
    assert found == [[case.expected(prompt)[:num_tokens]] for prompt in prompts]
    return engine


@pytest.mark.parametrize("attention", ["gather", "auto"])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_ranks_with_whole_experts_give_the_tokens_of_transformers(name: str, attention: str, tmp_path: Path) -> None:
    check(FamilyCase(name, tmp_path, CHANGES[name]), attention=attention, budget=16)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_so_do_the_triton_kernels(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"attention": "triton", "block_size": 16, "num_blocks": 8, "rows": 2, "max_len": 64}
    check(FamilyCase(name, tmp_path, CHANGES[name]), num_tokens=3, **sizes)


def test_so_do_three_ranks(tmp_path: Path) -> None:
    case = FamilyCase("qwen3_moe", tmp_path, {"num_experts": 7, "num_attention_heads": 6, "num_key_value_heads": 3})
    check(case, tensor=3, budget=16)


@pytest.mark.parametrize(
    "attention", ["gather", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="no triton"))]
)
@pytest.mark.parametrize("name", WITHOUT_SHARED)
def test_so_does_an_all_to_all(name: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all steps of two tokens and more."""
    if (name, attention) == ("mixtral", "triton") and not WHOLE:
        pytest.skip("its kernels are those of qwen3_moe; make families runs it")
    monkeypatch.setattr(expert_sum, "LEAST_ROWS", 2)
    monkeypatch.setattr(expert_sum, "LEAST_SAVING", 0.0)
    called = []
    sum_rows = expert_sum._sum_rows
    monkeypatch.setattr(expert_sum, "_sum_rows", lambda *given: called.append(given) or sum_rows(*given))
    is_triton = attention == "triton"
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 8, "rows": 2, "max_len": 64} if is_triton else {}
    check(FamilyCase(name, tmp_path, CHANGES[name]), num_tokens=3 if is_triton else 12, attention=attention, **sizes)
    assert called
