"""Tuning of gemm tilings on one device: trials, and a JSON table that is validated when it is read back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from quire.kernels.cuda.hopper_gemm import ALIGNMENT
from quire.kernels.cuda.scaled_gemm_plan import takes_rows
from quire.kernels.triton.compiling import compiling_only
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import MOST_ROWS, Found, Shape, Tiling, fits_workspace, rows_held
from quire.kernels.triton.gemm_trials import BYTES, Kind, Layer, Operands, candidates
from quire.kernels.triton.launch import FLOAT8
from quire.kernels.triton.measurement import Timer

logger = logging.getLogger("quire.kernels")

ROWS = (1, 16, 32, 64)  # one for each number of rows that tilings are made for
FLOAT8_ROWS = (*ROWS, 128, 256)  # cuBLAS is slower by a larger margin for float8
LARGEST_ERROR = 0.05
FORMAT = 2
_LIMITS = Tiling(MOST_ROWS, 512, 16384, 64, 32, 16)  # upper limits of every field


class Trial(NamedTuple):
    """The result of one layer with a number of rows. Times are in microseconds; infinite: no tiling could run."""

    layer: Layer
    rows: int
    kind: Kind
    present: Tiling  # the choice before tuning
    present_us: float
    best: Tiling
    best_us: float
    library_us: float | None  # None: cuBLAS has no such gemm


Run = Callable[[Layer, int, Kind], Trial]


def run_trial(device: torch.device, workspace: Workspace, timer: Timer) -> Run:
    """Return a function that runs trials on a device. The workspace must be as large as the engine's: tilings that do
    not fit in it fail."""

    def run(layer: Layer, rows: int, kind: Kind) -> Trial:
        operands, tilings = Operands.make(layer, rows, kind, device), candidates(layer, rows, kind, device)
        with compiling_only():
            for tiling in tilings:
                _can_run(lambda tiling=tiling: operands.call(layer, 0, workspace, tiling))  # type: ignore[misc]
        times = {tiling: _time(operands, layer, workspace, tiling, timer) for tiling in tilings}
        best = min(times, key=times.__getitem__)
        library = operands.library_calls(layer)
        library_us = timer(library) if library else None
        return Trial(layer, rows, kind, tilings[0], times[tilings[0]], best, times[best], library_us)

    return run


def tune(layers: Sequence[Layer], run: Run, *, float8: bool, hopper: bool = False) -> Iterator[Trial]:
    """Yield a trial of every layer with every number of rows. `float8`: with float8 weights except for the head, and
    float8 activations if there are several rows. `hopper`: the kernel of hopper_gemm.py runs on the
    device; gemms that they support are skipped."""
    for layer in layers:
        is_small = float8 and layer.name != "head"
        has_hopper_kernel = hopper and layer.inputs % ALIGNMENT == layer.weight_rows % ALIGNMENT == 0
        for rows in FLOAT8_ROWS if is_small else ROWS:
            if is_small and has_hopper_kernel and takes_rows(rows, FLOAT8):
                continue
            small: Kind = "w8" if rows == 1 else "w8a8"
            yield run(layer, rows, small if is_small else "bf16")


def found_by(trials: Sequence[Trial]) -> Found:
    """Return the best tilings, and for every weight the number of rows up to which they beat cuBLAS, where cuBLAS has
    the gemm."""
    tilings = {
        trial.layer.shape(trial.rows, trial.kind): trial.best for trial in trials if trial.best_us < float("inf")
    }
    own_rows: dict[tuple[int, int, int], int] = {}
    lost: set[tuple[int, int, int]] = set()
    for trial in sorted(trials, key=lambda trial: trial.rows):
        weight = trial.layer.weight_rows, trial.layer.inputs, BYTES[trial.kind][1]
        if trial.library_us is None or weight in lost:
            continue
        if trial.best_us <= trial.library_us:
            own_rows[weight] = trial.rows
        else:
            lost.add(weight)
            own_rows.setdefault(weight, 0)
    return Found(tilings, own_rows)


def to_json(found: Found, gpu: str, version: str) -> str:
    """Write a table of tilings for this device and version of Triton."""
    tilings = [[list(shape), list(tiling)] for shape, tiling in found.tilings.items()]
    own_rows = [[*weight, rows] for weight, rows in found.own_rows.items()]
    table = {"format": FORMAT, "gpu": gpu, "triton": version, "tilings": tilings, "own_rows": own_rows}
    return json.dumps(table, indent=1)


def from_json(text: str, gpu: str, version: str) -> Found:
    """Parse a table that `to_json` wrote for this device and version. Raises ValueError for anything else."""
    table = json.loads(text)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"it is not a tuning table of format {FORMAT}")
    if (table.get("gpu"), table.get("triton")) != (gpu, version):
        raise ValueError(f"it was made for {table.get('gpu')} with triton {table.get('triton')}")
    tilings = {}
    for shape, tiling in _lines(table, "tilings", 2):
        read = _shape(shape), Tiling(*_whole(tiling, len(Tiling._fields)))
        _check(*read)
        tilings[read[0]] = read[1]
    own_rows = {}
    for line in _lines(table, "own_rows", 4):
        outputs, inputs, weight_bytes, rows = _whole(line, 4)
        if rows > MOST_ROWS:
            raise ValueError(f"{rows} rows are more than {MOST_ROWS}")
        own_rows[outputs, inputs, weight_bytes] = rows
    return Found(tilings, own_rows)


def _can_run(call: Callable[[], None]) -> bool:
    """Whether a tiling can run at all: some need more shared memory, registers or workspace than there is."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the compiler and the driver raise arbitrary exceptions)
        logger.debug("a tiling cannot be run: %s", error)
        return False
    return True


def _time(operands: Operands, layer: Layer, workspace: Workspace, tiling: Tiling, timer: Timer) -> float:
    if not _can_run(lambda: operands.call(layer, 0, workspace, tiling)):
        return float("inf")
    is_accurate = operands.error(layer, workspace, tiling) <= LARGEST_ERROR
    return timer(operands.calls(layer, workspace, tiling)) if is_accurate else float("inf")


def _lines(table: dict[str, Any], name: str, width: int) -> list[list[Any]]:
    lines = table.get(name)
    if not isinstance(lines, list) or not all(isinstance(line, list) and len(line) == width for line in lines):
        raise ValueError(f"{name} must be a list of lists of {width}")
    return lines


def _whole(values: Any, count: int) -> list[int]:
    fits = isinstance(values, list) and len(values) == count
    if not fits or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r:.80} is not a list of {count} whole numbers")
    return list(values)


def _shape(values: Any) -> Shape:
    if not isinstance(values, list) or not values or type(values[-1]) is not bool:
        raise ValueError(f"{values!r:.80} is not a shape")
    rows, outputs, inputs, x_bytes, weight_bytes = _whole(values[:-1], 5)
    return Shape(rows, outputs, inputs, x_bytes, weight_bytes, values[-1])


def _check(shape: Shape, tiling: Tiling) -> None:
    """Raise ValueError unless launching the tiling is safe: its blocks hold the rows, and no field is beyond the
    kernels' limits."""
    blocks = (tiling.block_m, tiling.block_n, tiling.block_k, tiling.warps)
    if any(size < 1 or size & (size - 1) for size in blocks) or tiling.splits < 1 or tiling.stages < 1:
        raise ValueError(f"{tiling} has a block that is no power of two")
    one, holds = shape.rows == 1, tiling.block_m <= shape.rows
    if (tiling.block_m == 1) != one or not holds or rows_held(shape.rows) != shape.rows:
        raise ValueError(f"{tiling} is not for {shape.rows} rows")
    if not fits_workspace(shape, tiling) or (one and tiling.splits > 1):
        raise ValueError(f"{tiling} is split too often for {shape.outputs} outputs")
    if any(size > most for size, most in zip(tiling, _LIMITS, strict=True)):
        raise ValueError(f"{tiling} is larger than any kernel")
