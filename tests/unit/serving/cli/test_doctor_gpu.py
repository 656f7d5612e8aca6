from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.runtime import gpu_measurement
from quire.serving.cli import main
from quire.serving.cli.doctor_gpu import line_of, speed
from quire.serving.cli.tune import line_of as tuned_line

READING = {"name": "gate 8 x 8", "us": 12.0, "rate": 4.2e12, "counts_flops": False, "percent": 90.0}
CEILINGS = {"read": 4.7e12, "copy": 4e12, "matmul": 7.9e14, "to_device": 5.5e10, "to_host": 5.4e10}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["doctor", "--gpu"], ["doctor", "--gpu", "--json"], ["tune"]])
def test_without_a_gpu_the_reason_is_said(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert "finds no CUDA device" in capsys.readouterr().err


def test_json_is_for_the_gpu_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 2
    assert "--gpu" in capsys.readouterr().err


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there, measured."""

    def kernels(device: object, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
        assert (device, ceilings) == ("a gpu", CEILINGS)
        yield READING

    monkeypatch.setattr(gpu_measurement, "find_gpu", lambda: "a gpu")
    monkeypatch.setattr(gpu_measurement, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(gpu_measurement, "measure_kernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {device}")


@pytest.mark.usefixtures("_measured")
def test_ceilings_and_kernels_are_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["doctor", "--gpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NVIDIA a gpu, torch ")
    assert "read stream                   4.70 TB/s" in said
    assert "790 TFLOP/s" in said
    assert line_of(READING) in said


@pytest.mark.usefixtures("_measured")
def test_the_same_is_there_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["doctor", "--gpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ceilings"] == CEILINGS
    assert found["kernels"] == [READING]


@pytest.mark.usefixtures("_measured")
def test_a_kernel_that_cannot_run_is_told_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    broken = {"name": "gate", "error": "RuntimeError: no"}
    monkeypatch.setattr(gpu_measurement, "measure_kernels", lambda device, ceilings: iter([broken]))
    assert main(["doctor", "--gpu"]) == 1
    assert "failed: RuntimeError: no" in capsys.readouterr().out


def test_rates_are_shown_in_the_unit_that_suits_them() -> None:
    assert speed(5.5e10, counts_flops=False) == "55.0 GB/s"
    assert speed(4.68e12, counts_flops=False) == "4.68 TB/s"
    assert speed(7.9e14, counts_flops=True) == "790 TFLOP/s"


def test_a_tuned_product_shows_what_it_was_and_the_library_where_there_is_one() -> None:
    trial = {
        "layer": "down", "rows": 16, "kind": "bf16", "present_us": 30.0, "best_us": 25.5, "library_us": None,
        "tiling": [16, 64, 64, 2, 4, 4],
    }  # fmt: skip
    assert tuned_line(trial).split()[:6] == ["down", "16", "bf16", "30.0", "25.5", "-"]
