"""`quire doctor --gpu`: measures the GPU, and how much of its bandwidth or FLOP/s every kernel reaches."""

from __future__ import annotations

import argparse
import json
from typing import Any

CEILINGS = {
    "read": "read stream",
    "copy": "copy, read and written",
    "matmul": "bfloat16 gemm of 8192 x 8192",
    "to_device": "host to device, pinned",
    "to_host": "device to host, pinned",
}


def run_doctor_gpu(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 if a kernel failed. Raises QuireError without a GPU that can run the kernels."""
    from quire.runtime.gpu_measurement import find_gpu, measure_ceilings, measure_kernels

    device = find_gpu()
    facts = _facts(device)
    if not args.json:
        print(f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}\n\nmeasured ceilings")
    ceilings = measure_ceilings(device)
    if args.json:
        readings = list(measure_kernels(device, ceilings))
        print(json.dumps({**facts, "ceilings": ceilings, "kernels": readings}, indent=1))
    else:
        _print_ceilings(ceilings)
        print(f"\n{'kernel':<44}{'us':>10}{'achieved':>16}{'of the ceiling':>16}")
        readings = []
        for reading in measure_kernels(device, ceilings):
            readings.append(reading)
            print(line_of(reading), flush=True)
    return 1 if any("error" in reading for reading in readings) else 0


def line_of(reading: dict[str, Any]) -> str:
    """Return one kernel's measurement as a line of the table."""
    if "error" in reading:
        return f"{reading['name']:<44}failed: {reading['error']}"
    achieved = speed(reading["rate"], counts_flops=reading["counts_flops"])
    return f"{reading['name']:<44}{reading['us']:>10.1f}{achieved:>16}{reading['percent']:>14.0f} %"


def speed(rate: float, *, counts_flops: bool) -> str:
    """Format bytes or operations per second with a suitable unit."""
    if counts_flops:
        return f"{rate / 1e12:.0f} TFLOP/s"
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def _print_ceilings(ceilings: dict[str, float]) -> None:
    width = max(map(len, CEILINGS.values()))
    for name, rate in ceilings.items():
        print(f"  {CEILINGS[name]:<{width}}  {speed(rate, counts_flops=name == 'matmul')}")


def _facts(device: Any) -> dict[str, str]:
    import torch
    import triton

    return {"gpu": torch.cuda.get_device_name(device), "torch": str(torch.__version__), "triton": triton.__version__}
