"""Where there is no GPU, the runtime's Triton path runs in the interpreter. A tiny model of each family in turn."""

from __future__ import annotations

import pytest

import interpreter  # noqa: F401
from family_models import CASES, FamilyCase


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """In all files of this folder."""


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    return FamilyCase(request.param, tmp_path_factory.mktemp(request.param))
