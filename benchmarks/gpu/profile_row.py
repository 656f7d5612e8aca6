"""Profiles whole rows of benchmarks.gpu: python -m benchmarks.gpu.profile_row --model llama-3.2-3b --rows burst,nano

Every row runs twice, and a third time under the profiler. Prints the seconds of these runs, the share of time in which
the GPU was busy, also in twenty equal parts of the run, and the kernels that took most. The profiler makes a run
slower, above all one of many small kernels.
"""

from __future__ import annotations

import argparse

from benchmarks.gpu import floor
from benchmarks.gpu.__main__ import WHOLE, Bench
from benchmarks.gpu.device_profile import profiled, show
from benchmarks.gpu.models import MODELS, find_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"of {', '.join(MODELS)}, or the path of a config.json")
    parser.add_argument("--rows", default="nano", help=f"of {', '.join(WHOLE)}")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), default=None)
    parser.add_argument("--kv-cache-dtype", choices=tuple(floor.KV_BYTES), default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--top", type=int, default=24, help="kernels to list")
    options = parser.parse_args()
    rows = options.rows.split(",")
    if unknown := [row for row in rows if row not in WHOLE]:
        parser.error(f"unknown rows {', '.join(unknown)}; choose from {', '.join(WHOLE)}")
    settings = {
        "quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype,
        "block_size": options.block_size,
    }  # fmt: skip
    if options.max_num_batched_tokens is not None:
        settings["max_num_batched_tokens"] = options.max_num_batched_tokens
    bench = Bench(options.model, find_model(options.model), settings)
    bench.start()
    bench.warm_up()
    for row in rows:
        for repeat in range(2):
            bench.run(row, repeat)
        print(f"{row}, under the profiler:")
        show(profiled(lambda row=row: bench.run(row, 2)), options.top)  # type: ignore[misc]


if __name__ == "__main__":
    main()
