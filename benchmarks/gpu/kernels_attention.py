"""Checks and times the attention kernels on a GPU: python -m benchmarks.gpu.kernels_attention --json PATH [--tune]

Every case is first compared with the reference, many at once in separate processes, which also fills the compiler's
cache. Then the timed cases run alone, inside CUDA graphs, over caches of several layers in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.attention_cases import HEADS, Bench, Case
from benchmarks.gpu.attention_tuning import decodes, show_best, skewed, tuning_cases
from quire.kernels.triton.attention_config import SplitConfig, decode_configs
from quire.kernels.triton.attention_schedule import fill_split_plan

READ_BANDWIDTH = 4.68e12  # bytes per second, measured on an H200
MATRIX_RATE = 790e12  # operations per second, bf16, measured on an H200
# Of outputs near 1, which are bfloat16 themselves.
LARGEST_ERROR = {"bf16": 0.04, "fp16": 0.04, "fp8": 0.08, "int8": 0.04, "int4": 0.04}
REPEATS = 7
LAUNCHES = 48  # in a graph
WORKERS = 8


def feature_cases() -> list[Case]:
    """Return small cases that test correctness: every head size, block size and feature."""
    few = ((299, 1), (0, 1), (63, 1), (1499, 1), (64, 1))
    chunks = ((0, 200), (333, 70), (64, 129))
    cases = [
        Case(f"{kind} dim {dim} block {block} {dtype}", kind, rows, (8, 2), dim, block, dtype)
        for kind, rows in (("decode", few), ("prefill", chunks))
        for dim, block, dtype in (
            (64, 1, "bf16"), (80, 16, "fp16"), (96, 32, "bf16"), (256, 128, "bf16"), (128, 64, "fp8"), (64, 16, "fp8"),
        )
    ]  # fmt: skip
    cases += [
        Case(f"prefill dim {dim} block {block} window {window}, cap {cap}", "prefill", chunks, heads, dim, block,
             window=window, softcap=cap, sinks=cap is not None)
        for dim, block, heads in ((80, 16, (8, 8)), (80, 64, (14, 2)), (96, 8, (8, 8)), (96, 256, (6, 2)))
        for window, cap in ((None, None), (100, None), (65, 20.0))
    ]  # fmt: skip
    for kind, rows in (("decode", few), ("prefill", chunks)):
        cases.append(Case(f"{kind} window 100", kind, rows, (14, 2), 128, 16, window=100))
        cases.append(
            Case(f"{kind} window, cap, sinks", kind, rows, (6, 2), 128, 64, window=65, softcap=20.0, sinks=True)
        )
    ways = {
        "swap_ab": SplitConfig(8, 32, 1, 3, 792, 8, swap_ab=True),
        "whole": SplitConfig(16, 64, 2, 3, 396, 4),
    }
    cases += [
        Case(f"decode {way} dim {dim} block {block} {dtype}", "decode", few, (8, 2), dim, block, dtype, split=split)
        for dim, block, dtype in (
            (64, 1, "bf16"),
            (80, 16, "fp16"),
            (128, 64, "bf16"),
            (128, 16, "fp8"),
            (96, 64, "fp8"),
        )
        for way, split in ways.items()
    ]
    cases += [
        Case(
            f"decode {way} window, cap, sinks", "decode", few, (6, 2), 128, 64, window=65, softcap=20.0, sinks=True,
            split=split,
        )
        for way, split in ways.items()
    ]  # fmt: skip
    cases += [
        Case(f"prefill {way} dim {dim} block {block} {dtype}", "prefill", chunks, (8, 2), dim, block, dtype,
             softcap=20.0 if dim == 64 else None, scales=True, copied=copied)
        for dim, block, dtype in (
            (64, 16, "fp8"), (128, 64, "fp8"), (256, 1, "fp8"), (128, 16, "int8"), (128, 16, "int4"), (64, 64, "int4"),
        )
        for way, copied in (("scales", 0), ("copied", 64))
    ]  # fmt: skip
    for group in (2, 5, 16):
        rows = tuple((320 + 7 * row, 1) for row in range(6 * group))
        cases.append(Case(f"cascade groups of {group}", "cascade", rows, (12, 4), group=group, prefix=256))
    return cases


def timed_cases() -> list[Case]:
    cases = []
    for model, heads in HEADS.items():
        for block in (16, 64):
            for rows, context in ((16, 1024), (64, 1024), (16, 4096), (256, 512), (256, 1024)):
                name = f"decode {model} block {block} {rows}x{context}"
                cases.append(Case(name, "decode", decodes(rows, context), heads, block=block))
    eight = HEADS["8B"]
    cases += [Case(f"decode 8B block 16 1x{n}", "decode", decodes(1, n), eight) for n in (256, 8192)]
    cases += [Case("decode 8B block 16 64 skewed", "decode", skewed(64), eight)]
    cases += [
        replace(Case(f"decode 8B block 16 {r}x{n} dependent", "decode", decodes(r, n), eight), dependent=True)
        for r, n in ((16, 1024), (64, 1024))
    ]
    cases += [
        Case(f"decode 8B block {b} {r}x{n} fp8", "decode", decodes(r, n), eight, block=b, dtype="fp8")
        for b, r, n in ((16, 64, 1024), (64, 64, 1024), (16, 256, 1024))
    ]
    for block in (16, 64):
        for count, tokens in ((16, 512), (4, 2048), (1, 8192)):
            name = f"prefill 8B block {block} {count}x{tokens}"
            cases.append(Case(name, "prefill", ((0, tokens),) * count, eight, block=block))
    cases += [
        Case("prefill 0.6B block 16 4x2048", "prefill", ((0, 2048),) * 4, HEADS["0.6B"]),
        Case("prefill 8B 2048 after 6144", "prefill", ((6144, 2048),), eight),
        Case("prefill 8B 2048 after 6144 fp8", "prefill", ((6144, 2048),), eight, dtype="fp8"),
    ]
    cases += [  # the heads of Phi-2 and of Phi-3-mini, by the Hopper kernel and by the portable one
        Case(f"prefill dim {dim} {shape}{way}", "prefill", rows, (32, 32), dim, portable=way != "")
        for dim in (80, 96)
        for shape, rows in (
            ("16x512", ((0, 512),) * 16), ("4x2048", ((0, 2048),) * 4), ("1x8192", ((0, 8192),)),
            ("2048 after 6144", ((6144, 2048),)),
        )
        for way in ("", " portable")
    ]  # fmt: skip
    cases += [  # from the cache itself, and from a dequantized copy, whose creation is timed too
        Case(f"prefill 8B {shape} {dtype} {way}", "prefill", rows, eight, dtype=dtype, scales=True, copied=copied)
        for shape, rows in (("2048 after 6144", ((6144, 2048),)), ("4x2048", ((0, 2048),) * 4))
        for dtype, way, copied in (
            ("fp8", "scales", 0), ("fp8", "copied", 64), ("fp8", "copied by 16", 16),
            ("int8", "scales", 0), ("int8", "copied", 64), ("int4", "scales", 0), ("int4", "copied", 64),
        )
    ]  # fmt: skip
    cases += [  # sizes from which a copy is faster
        Case(f"prefill 8B {count} after {start} fp8 {way}", "prefill", ((start, count),), eight, dtype="fp8",
             scales=True, copied=copied)
        for start, count in ((0, 128), (0, 256), (0, 1000), (4096, 32), (4096, 64), (4096, 128))
        for way, copied in (("scales", 0), ("copied", 64))
    ]  # fmt: skip
    for groups, group, prefix, suffix in ((1, 256, 2048, 160), (64, 8, 512, 64)):
        for model, heads in HEADS.items():
            rows = tuple((prefix + suffix - 1, 1) for _ in range(groups * group))
            name = f"cascade {model} {groups} groups of {group}, {prefix}+{suffix}"
            cases.append(Case(name, "cascade", rows, heads, group=group, prefix=prefix))
            cases.append(Case(f"  without: {name[8:]}", "decode", rows, heads, group=group, prefix=prefix))
    return cases


def small(case: Case) -> Case:
    """Return the same kernel on little data: at most four sequences, shortened, or one group and a half."""
    if case.kind == "cascade":
        return case if len(case.sequences) <= 96 else replace(case, sequences=case.sequences[: max(case.group, 64)])
    return replace(case, sequences=tuple((min(start, 700), min(count, 300)) for start, count in case.sequences[:4]))


def checked(case: Case) -> tuple[str, float | str]:
    """Return, in a separate process, the error of a small run, or the text of a failure."""
    try:
        return case.name, Bench(case, layer_bytes=0).error()
    except Exception as failure:  # noqa: BLE001  one kernel that does not build must not hide the others
        return case.name, f"{type(failure).__name__}: {str(failure)[:200]}"


def check_all(cases: list[Case]) -> dict[str, float | str]:
    """Check many cases at once. Failed ones are retried alone, because a fault makes its whole process unusable."""
    context = get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        checks = dict(pool.map(checked, cases))
    again = [case for case in cases if isinstance(checks[case.name], str)]
    if again:
        with ProcessPoolExecutor(WORKERS, mp_context=context, max_tasks_per_child=1) as pool:
            checks |= dict(pool.map(checked, again))
    return checks


def time_launches(launches: list[Callable[[], None]]) -> float:
    """Return the seconds of one launch: the median of several replays of a graph of many launches."""
    for launch in launches[:2]:
        launch()
    count = max(len(launches), LAUNCHES // len(launches) * len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            launches[number % len(launches)]()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(times)


def cudnn_seconds(case: Case) -> float | None:
    """Return the seconds of the same prompts, contiguous, with cuDNN; None if cuDNN does not support the case."""
    starts, counts = {start for start, _ in case.sequences}, {count for _, count in case.sequences}
    if starts != {0} or len(counts) > 1:
        return None
    (query_heads, kv_heads), tokens, rows = case.heads, counts.pop(), len(case.sequences)
    q, k, v = (torch.randn(rows, tokens, heads, case.dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
               for heads in (query_heads, kv_heads, kv_heads))  # fmt: skip
    k, v = (side.repeat_interleave(query_heads // kv_heads, dim=1) for side in (k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        try:
            return time_launches([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)])  # type: ignore[list-item]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an unsupported head size
            return None


def measure(case: Case) -> dict[str, object]:
    bench = Bench(case)
    error = bench.error()
    seconds = time_launches(bench.launches())
    row: dict[str, object] = {"case": case.name, "error": error, "right": error <= LARGEST_ERROR[case.dtype]}
    row |= {"us": seconds * 1e6}
    if case.kind == "prefill":
        rate, other = case.flops / seconds, cudnn_seconds(case)
        row |= {"tflops": rate / 1e12, "percent": 100 * rate / MATRIX_RATE}
        if other is not None:
            row |= {"cudnn_us": other * 1e6, "percent_of_cudnn": 100 * other / seconds}
    else:
        rate = case.num_bytes / seconds
        row |= {"gbs": rate / 1e9, "percent": 100 * rate / READ_BANDWIDTH}
    return row


def plan_rows() -> Iterable[dict[str, object]]:
    """Yield the time of building the work list, which happens once per step."""
    for rows in (16, 256, 512):
        bench = Bench(Case("", "decode", decodes(rows, 64)), layer_bytes=0)
        seconds = time_launches([lambda bench=bench: fill_split_plan(bench.plan, bench.lengths)])
        yield {"case": f"work list of {rows} rows", "us": seconds * 1e6}


def show(row: dict[str, object]) -> None:
    rate = f"{row['tflops']:7.0f} TFLOP/s" if "tflops" in row else f"{row['gbs']:7.0f} GB/s   " if "gbs" in row else ""
    percent = f"{row['percent']:5.1f} % of ceiling" if "percent" in row else ""
    if "percent_of_cudnn" in row:
        percent += f", {row['percent_of_cudnn']:5.1f} % of cuDNN"
    error = f"{row['error']:.1e}{'' if row['right'] else ' WRONG'}" if "error" in row else ""
    print(f"{row['case']:<58} {error:>9} {row['us']:9.1f} us {rate} {percent}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="time other tile sizes instead of the chosen ones")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=105, help="start no further case after this long")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    found = tuning_cases() if options.tune else timed_cases()
    timed = [case for case in found if options.only in case.name]
    wanted = [] if options.tune else [case for case in feature_cases() if options.only in case.name]
    results: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    used = decode_configs(HEADS["8B"], 128, torch.bfloat16, torch.device("cuda"), 1024)
    results["decode_configs"] = [(most, asdict(config)) for most, config in used]
    kernels = {replace(case, name="", sequences=()): case for case in map(small, timed)}  # one case of each
    checks = check_all(wanted + list(kernels.values()))
    limits = {case.name: LARGEST_ERROR[case.dtype] for case in wanted + timed}
    wrong = [name for name, error in checks.items() if not (isinstance(error, float) and error <= limits[name])]
    for name in [case.name for case in wanted] + [name for name in wrong if name not in {c.name for c in wanted}]:
        print(f"checked {name:<50} {checks[name]:.1e}" if name not in wrong else f"WRONG {name}: {checks[name]}")
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks right, {time.perf_counter() - began:.0f} s", flush=True)
    rows: list[dict[str, object]] = []
    for case in timed:
        if time.perf_counter() - began > options.seconds:
            print(f"not timed, out of time: {case.name}")
        elif case.name not in wrong:
            rows.append(measure(case))
            show(rows[-1])
            wrong += [] if rows[-1]["right"] else [case.name]
    if options.tune:
        show_best(rows)
    else:
        for row in plan_rows():
            rows.append(row)
            show(row)
    options.json.write_text(json.dumps(results | {"checks": checks, "wrong": wrong, "timed": rows}, indent=1))
    print(f"{time.perf_counter() - began:.0f} s", "ALL RIGHT" if not wrong else f"{len(wrong)} WRONG")


if __name__ == "__main__":
    main()
