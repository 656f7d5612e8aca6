"""Measures what a GPU can do and what fraction of it the kernels reach, and tunes their tilings, for the command
line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire.config.model import ModelConfig
from quire.runtime.accelerator import LEAST_CAPABILITY
from quire.runtime.tuned import add_to_table
from quire.types.errors import QuireError

FLOAT8_CAPABILITY = (8, 9)


def find_gpu() -> torch.device:
    """Return the current GPU, which is measured. Raises QuireError if the kernels cannot run on it."""
    if not torch.cuda.is_available():
        raise QuireError(f"torch {torch.__version__} finds no CUDA device; `quire doctor` shows what is installed")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise QuireError(f"{torch.cuda.get_device_name(device)} is too old for the Triton kernels")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise QuireError("triton is not installed; install it in torch's environment") from None
    return device


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Return the GPU's limits by name, in bytes or operations per second."""
    from quire.kernels.triton import measurement

    return measurement.measure_ceilings(device)._asdict()


def measure_kernels(device: torch.device, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield a measurement of each kernel, or its name and the error that prevented it."""
    from quire.kernels.triton.compiling import compiling_only
    from quire.kernels.triton.measurement import Ceilings, graph_us, measure
    from quire.kernels.triton.measurement_cases import Sizes, cases

    has_float8 = torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
    for make in cases(Sizes(), device, float8=has_float8):
        case = make()
        try:
            with compiling_only():
                case.calls[0]()
            yield measure(case, Ceilings(**ceilings), graph_us)._asdict()
        except Exception as error:  # noqa: BLE001  (one kernel must not hide the others)
            yield {"name": case.name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def tune_gemms(
    device: torch.device, model: ModelConfig, *, float8: bool, report: Callable[[dict[str, Any]], None]
) -> str:
    """Try tilings of every gemm of the model, and save the best for later engines. Returns the path of the file."""
    import triton

    from quire.kernels.cuda.hopper_gemm import runs_on
    from quire.kernels.triton.gemm_skinny import Workspace
    from quire.kernels.triton.measurement import graph_us
    from quire.kernels.triton.measurement_cases import Sizes
    from quire.kernels.triton.tuning import found_by, run_trial, tune

    numbers = (model.hidden_size, model.intermediate_size)
    sizes = [Sizes(*numbers, each.num_query, each.num_kv, each.dim, model.vocab_size) for each in model.all_heads]
    layers = list(dict.fromkeys(layer for each in sizes for layer in each.layers()))
    trials = []
    run = run_trial(device, Workspace.make(device), graph_us)
    for trial in tune(layers, run, float8=float8, hopper=runs_on(device)):
        trials.append(trial)
        report(
            {
                "layer": trial.layer.name, "rows": trial.rows, "kind": trial.kind, "present_us": trial.present_us,
                "best_us": trial.best_us, "library_us": trial.library_us, "tiling": list(trial.best),
            }
        )  # fmt: skip
    gpu = torch.cuda.get_device_name(device)
    return str(add_to_table(found_by(trials), gpu, triton.__version__))
