"""Mixtures of experts against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_bench import SIZES, check_parity, hf_checkpoint

transformers = pytest.importorskip("transformers")
BACKENDS = ["reference", "auto", "triton"]


def mixtral(**changes: Any) -> Any:
    return transformers.MixtralConfig(**SIZES, **{"num_local_experts": 5, "num_experts_per_tok": 2, **changes})


@pytest.mark.parametrize("attention", BACKENDS)
def test_mixtral(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, mixtral()), attention=attention)
