"""Pooling to one vector per text."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from quire.config.embedding import EmbeddingSettings, Pooling
from quire.runtime.finished_rows import finish_rows
from quire.runtime.pooling import pool
from quire.types.pooling import PoolingParams

HIDDEN = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0], [0.0, 4.0]])
LENGTHS = torch.tensor([3, 1])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("mean", [[3.0, 3.0], [0.0, 4.0]]),
        ("cls", [[1.0, 2.0], [0.0, 4.0]]),
        ("last", [[5.0, 1.0], [0.0, 4.0]]),
    ],
)
def test_each_text_has_its_own_vector(kind: Literal["mean", "cls", "last"], wanted: list[list[float]]) -> None:
    found = pool(HIDDEN, LENGTHS, Pooling(kind, normalize=False))
    torch.testing.assert_close(found, torch.tensor(wanted))
    pooled = pool(HIDDEN.bfloat16(), LENGTHS, Pooling(kind))
    unit = torch.from_numpy(finish_rows(pooled.numpy(), EmbeddingSettings(Pooling(kind)), PoolingParams()))
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit, torch.nn.functional.normalize(torch.tensor(wanted), dim=-1))
