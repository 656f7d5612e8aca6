from __future__ import annotations

import logging
from pathlib import Path

import pytest

from interpreter import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

from quire.kernels.triton.gemm_skinny_plan import Found, Shape, Tiling
from quire.runtime.tuned import add_to_table, read_table, table_path

GPU = ("NVIDIA H200", "3.6.0")
ONE = Found({Shape(16, 64, 128, 2, 2, False): Tiling(16, 64, 64, 2, 4, 4)}, {(64, 128, 2): 16})
OTHER = Found({Shape(1, 64, 128, 2, 2, True): Tiling(1, 4, 1024, 1, 4, 1)}, {(128, 128, 1): 1})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))


def test_without_a_table_read_table_returns_none() -> None:
    assert read_table(*GPU) is None


def test_a_table_belongs_to_a_gpu_and_a_version() -> None:
    path = add_to_table(ONE, *GPU)
    assert path.name == "nvidia-h200-triton-3-6-0.json"
    assert read_table(*GPU) == ONE
    assert read_table("NVIDIA A100", "3.6.0") is None


def test_another_model_is_added_to_the_table() -> None:
    add_to_table(ONE, *GPU)
    add_to_table(OTHER, *GPU)
    assert read_table(*GPU) == Found(ONE.tilings | OTHER.tilings, ONE.own_rows | OTHER.own_rows)
    assert [path.name for path in table_path(*GPU).parent.iterdir()] == ["nvidia-h200-triton-3-6-0.json"]


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"format": 2}'])
def test_a_broken_table_is_named_in_a_warning_and_ignored(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = table_path(*GPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert read_table(*GPU) is None
    assert str(path) in caplog.text
    assert "quire tune" in caplog.text
