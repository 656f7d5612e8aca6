from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from interpreter import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

import torch

from quire.kernels.triton import gemm_skinny_plan as plan
from quire.kernels.triton import gemm_trials
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_trials import Kind, Layer, candidates
from quire.kernels.triton.tuning import FLOAT8_ROWS, ROWS, Run, Trial, found_by, from_json, run_trial, to_json, tune

CPU = torch.device("cpu")
OUTPUT, HEAD = Layer("output", 64, 128, residual=True), Layer("head", 640, 128)
GPU = ("NVIDIA H200", "3.6.0")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    plan.adopt(plan.Found({}, {}))


def pretend(faster_than_library: dict[str, int]) -> Run:
    """Trials in which the last candidate wins, and beats the library up to so many rows."""

    def run(layer: Layer, rows: int, kind: Kind) -> Trial:
        tilings = candidates(layer, rows, kind, CPU)
        library = 2.0 if rows <= faster_than_library[layer.name] else 0.5
        return Trial(layer, rows, kind, tilings[0], 3.0, tilings[-1], 1.0, library if kind != "w8" else None)

    return run


def test_every_layer_is_tried_with_every_number_of_rows() -> None:
    trials = list(tune([OUTPUT, HEAD], pretend({"output": 64, "head": 64}), float8=False))
    assert [(trial.layer.name, trial.rows) for trial in trials] == [(n, r) for n in ("output", "head") for r in ROWS]
    assert {trial.kind for trial in trials} == {"bf16"}


def test_float8_is_tried_as_the_engine_runs_it_and_never_for_the_head() -> None:
    trials = list(tune([OUTPUT, HEAD], pretend({"output": 64, "head": 64}), float8=True))
    assert [trial.kind for trial in trials] == ["w8"] + ["w8a8"] * 5 + ["bf16"] * 4
    assert [trial.rows for trial in trials] == [*FLOAT8_ROWS, *ROWS]


def test_rows_that_the_product_for_hopper_takes_are_not_tried() -> None:
    odd = Layer("odd", 100, 200)
    trials = list(tune([OUTPUT, odd, HEAD], pretend({"output": 64, "odd": 64, "head": 64}), float8=True, hopper=True))
    tried = [tuple(trial.rows for trial in trials if trial.layer is layer) for layer in (OUTPUT, odd, HEAD)]
    assert tried == [ROWS, FLOAT8_ROWS, ROWS]


def test_the_best_tiling_is_chosen_once_it_was_adopted() -> None:
    trials = list(tune([HEAD], pretend({"head": 32}), float8=False))
    best = {trial.rows: trial.best for trial in trials}
    plan.adopt(found_by(trials))
    assert plan.choose_tiling(64, 640, 128, 2, 2, False, CPU) == best[64]
    assert plan.choose_tiling(9, 640, 128, 2, 2, False, CPU) == best[16]
    assert plan.own_rows(640, 128) == 32
    plan.adopt(plan.Found({}, {}))
    assert plan.choose_tiling(64, 640, 128, 2, 2, False, CPU) == trials[-1].present


def test_a_product_that_never_beats_the_library_is_left_to_it() -> None:
    found = found_by(list(tune([OUTPUT], pretend({"output": 0}), float8=False)))
    assert found.own_rows == {(64, 128, 2): 0}


def test_float8_weights_have_rows_of_their_own() -> None:
    plan.adopt(found_by(list(tune([OUTPUT], pretend({"output": 128}), float8=True))))
    assert plan.own_rows(64, 128, "fp8") == 128
    assert plan.own_rows(64, 128) == 16
    plan.adopt(found_by(list(tune([OUTPUT], pretend({"output": 0}), float8=True))))
    assert plan.own_rows(64, 128, "fp8") == 1


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_candidate_for_many_rows_fits_the_workspace_and_wastes_no_split(
    rows: int, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_trials, "num_processors", lambda _: 132)
    layer = Layer("large", 4096, 14336, activation)
    tilings = candidates(layer, rows, "w8a8", CPU)
    assert len(tilings) > 3
    for tiling in tilings:
        steps = -(-14336 // tiling.block_k)
        assert plan.fits_workspace(layer.shape(rows, "w8a8"), tiling)
        assert (tiling.splits - 1) * -(-steps // tiling.splits) < steps


def test_float8_has_no_library_product_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_trials, "num_copies", lambda _: 1)
    for rows, kind in ((1, "w8"), (3, "w8a8")):
        assert gemm_trials.Operands.make(OUTPUT, rows, kind, CPU).library_calls(OUTPUT) == []


def test_a_tiling_that_could_not_be_run_is_never_kept() -> None:
    trial = pretend({"output": 64})(OUTPUT, 16, "bf16")._replace(best_us=float("inf"))
    assert found_by([trial]).tilings == {}


def test_a_real_trial_times_only_tilings_that_compute_the_truth() -> None:
    timed: list[int] = []

    def timer(calls: Any) -> float:
        calls[0]()
        timed.append(len(calls))
        return float(100 - len(timed))

    trial = run_trial(CPU, Workspace.make(CPU, numbers=1 << 16), timer)(Layer("small", 32, 64), 1, "bf16")
    assert len(timed) == len(candidates(trial.layer, 1, "bf16", CPU)) + 1  # and the library
    assert trial.best_us < trial.present_us
    assert trial.library_us == 100 - len(timed)


def test_a_table_comes_back_as_it_was_written() -> None:
    found = found_by(list(tune([OUTPUT, HEAD], pretend({"output": 16, "head": 64}), float8=False)))
    assert from_json(to_json(found, *GPU), *GPU) == found


def _table(**changes: Any) -> str:
    table = {
        "format": 2, "gpu": GPU[0], "triton": GPU[1], "own_rows": [[64, 128, 2, 16]],
        "tilings": [[[16, 64, 128, 2, 2, False], [16, 64, 64, 2, 4, 4]]],
    }  # fmt: skip
    return json.dumps(table | changes)


def test_a_table_of_the_same_device_and_version_is_read() -> None:
    assert from_json(_table(), *GPU).own_rows == {(64, 128, 2): 16}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        _table(format=1),
        _table(gpu="NVIDIA A100"),
        _table(triton="3.7.0"),
        _table(tilings=None),
        _table(tilings=[[[16, 64, 128, 2, 2, False]]]),
        _table(tilings=[[[16, 64, 128, 2, 2, 0], [16, 64, 64, 2, 4, 4]]]),
        _table(tilings=[[[16, 64, 128, 2, 2, False], [16, 64, 63, 2, 4, 4]]]),
        _table(tilings=[[[16, 64, 128, 2, 2, False], [32, 64, 64, 2, 4, 4]]]),
        _table(tilings=[[[16, 64, 128, 2, 2, False], [16, 64, 64, 2.0, 4, 4]]]),
        _table(tilings=[[[64, 100_000, 128, 2, 2, False], [64, 64, 64, 16, 4, 4]]]),
        _table(tilings=[[[1, 64, 128, 2, 2, False], [1, 64, 1024, 2, 4, 1]]]),
        _table(tilings=[[[16, 64, 128, 2, 2, False], [1, 64, 1024, 1, 4, 1]]]),
        _table(own_rows=[[64, 128, 16]]),
        _table(own_rows=[[64, 128, 1, 257]]),
        _table(own_rows=[[64, -128, 2, 1]]),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(text, *GPU)
