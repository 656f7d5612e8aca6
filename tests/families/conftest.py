"""Where there is no GPU, the runtime's Triton path runs in the interpreter. A tiny model of each family in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import interpreter  # noqa: F401
from family_models import CASES, FamilyCase
from quire.kernels.native.loader import set_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models so small gain nothing from more."""
    before = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(before)


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    return FamilyCase(request.param, tmp_path_factory.mktemp(request.param))
