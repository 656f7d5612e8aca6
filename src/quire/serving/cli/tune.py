"""`quire tune`: finds the fastest tilings of a model's gemms on this GPU and stores them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from quire.serving.cli.arguments import Commands, OneLineParser, add_model, examples


def add_tune(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the fastest kernel tilings for a model on this GPU",
        description="Measure tilings of a model's gemms on this GPU and store the fastest for later starts.",
        **examples(
            {
                "quire tune --model qwen3-0.6b": "tune for bfloat16 weights",
                "quire tune --model org/name --quantization fp8": "tune for engines with --quantization fp8",
            }
        ),
    )
    add_model(parser)
    parser.add_argument(
        "--quantization", choices=("fp8",), help="tune for weights that are quantized so while loading (as stored)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each gemm instead of a table")


def run_tune(args: argparse.Namespace) -> int:
    """Tune a model's gemms. Raises QuireError without a GPU that can run the kernels."""
    from quire.runtime.gpu_measurement import find_gpu, tune_gemms
    from quire.runtime.loading.model_config import read_model_config
    from quire.runtime.loading.resolve import resolve_model
    from quire.runtime.models.registry import check_generates

    device = find_gpu()
    model = read_model_config(resolve_model(args.model))
    check_generates(model.architecture)
    if not args.json:
        print(f"{'gemm':<12}{'rows':>6}{'kind':>6}{'was us':>10}{'best us':>10}{'library us':>12}  tiling")

    def report(trial: dict[str, Any]) -> None:
        print(json.dumps(trial) if args.json else line_of(trial), flush=True)

    path = tune_gemms(device, model, float8=args.quantization == "fp8", report=report)
    print(json.dumps({"path": path}) if args.json else f"\nkept in {path}")
    return 0


def line_of(trial: dict[str, Any]) -> str:
    """Return one trial as a line of the table."""
    library = "-" if trial["library_us"] is None else f"{trial['library_us']:.1f}"
    times = f"{trial['present_us']:>10.1f}{trial['best_us']:>10.1f}{library:>12}"
    return f"{trial['layer']:<12}{trial['rows']:>6}{trial['kind']:>6}{times}  {trial['tiling']}"
