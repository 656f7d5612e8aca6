"""Measures the cost of quantization: python -m benchmarks.perplexity --model MODEL [--model MODEL ...] --text FILE
    [--quantization none,int8,fp8,int4] [--kv-cache-dtype auto,fp8,int8,int4] [--tokens 4096] [--window 512]
    [--device cpu] [--cpu-weights integer] [--llama-library PATH] [--json PATH]

Prints the perplexity of a text under every model with every kind of quantization of weights and of the KV cache, the
memory of the weights, and the bytes that a token takes in the cache. A quantized checkpoint (GPTQ, AWQ,
compressed-tensors, FP8, GGUF) is read as stored, with the quantization "none". With a library that exports llama.cpp's
functions (like the one in the package xllamacpp), GGUF files also get a line by llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, facts, table
from quire import LLM, SamplingParams
from quire.config.arguments import CPU_WEIGHTS

KINDS = ("none", "fp8", "int8", "int4")
CACHES = ("auto", "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Figure:
    model: str
    quantization: str
    kv_cache_dtype: str
    perplexity: float
    weight_bytes: int
    token_bytes: int  # in the KV cache
    num_tokens: int


def perplexity(llm: LLM, tokens: Sequence[int], window: int) -> float:
    """Return the perplexity of all tokens except the first of each window; each token sees only the tokens of its
    window."""
    windows = [list(tokens[begin : begin + window]) for begin in range(0, len(tokens), window)]
    reading = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for output in llm.generate([each for each in windows if len(each) > 1], reading, use_tqdm=False):
        for token, line in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            if line is not None:
                total, count = total - line[token].logprob, count + 1
    return math.exp(total / count)


def measure(
    model: str, kind: str, cache: str, text: str, settings: dict[str, Any], options: argparse.Namespace
) -> Figure:
    usual: dict[str, Any] = {"max_model_len": options.window + 2, "max_num_seqs": 16, "kv_cache_memory": "256MiB"}
    given = {"quantization": None if kind == "none" else kind, "kv_cache_dtype": cache}
    with LLM(model, **(usual | settings | given)) as llm:
        tokens = llm.tokenizer.encode(text[: 16 * options.tokens])[: options.tokens]
        found = perplexity(llm, tokens, options.window)
        stored = llm.model_config.quantization
        name = stored if kind == "none" and stored else kind
        plan = llm.memory_plan
        token_bytes = plan.block_bytes // plan.block_size
        return Figure(Path(model).name, name, cache, found, plan.weights, token_bytes, len(tokens))


def measure_llama(model: str, text: str, settings: dict[str, Any], options: argparse.Namespace) -> Figure:
    """Measure the same tokens with llama.cpp."""
    from benchmarks.llama_cpp import llama_perplexity
    from quire.runtime.loading.resolve import resolve_model
    from quire.serving.text.tokenizer import load_tokenizer

    files = resolve_model(model)
    tokenizer = load_tokenizer(resolve_model(settings.get("tokenizer", model)))
    tokens = tokenizer.encode(text[: 16 * options.tokens])[: options.tokens]
    found = llama_perplexity(options.llama_library, files.path, tokens, options.window)
    return Figure(Path(model).name, "llama.cpp", "its own", found, files.path.stat().st_size, 0, len(tokens))


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="a folder, a .gguf file or a name; repeatable")
    parser.add_argument("--text", type=Path, help="a text file; without one, the repository's documentation")
    parser.add_argument("--quantization", default="none", help=f"of {', '.join(KINDS)}; several with commas")
    parser.add_argument("--kv-cache-dtype", default="auto", help=f"of {', '.join(CACHES)}; several with commas")
    parser.add_argument("--tokenizer", help="of another model than the one that is measured")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512, help="tokens that are read as one prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cpu-weights", choices=("auto", *CPU_WEIGHTS), default="auto", help="as in LLM")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--llama-library", type=Path, help="a shared library with llama.cpp, for GGUF models")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    kinds, caches = options.quantization.split(","), options.kv_cache_dtype.split(",")
    for given, known, name in ((kinds, KINDS, "quantization"), (caches, CACHES, "KV cache dtype")):
        if unknown := [kind for kind in given if kind not in known]:
            parser.error(f"unknown {name} {', '.join(unknown)}; choose from {', '.join(known)}")
    if options.tokens < 2 or options.window < 2:
        parser.error("--tokens and --window must be at least 2")
    documents = [options.text] if options.text else sorted((ROOT / "docs").rglob("*.md"))
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in documents)
    settings = {"device": options.device, "dtype": options.dtype, "load_format": options.load_format}
    settings["cpu_weights"] = options.cpu_weights
    settings |= {"tokenizer": options.tokenizer} if options.tokenizer else {}
    found = []
    for model in options.model:
        found += [measure(model, kind, cache, text, settings, options) for kind in kinds for cache in caches]
        if options.llama_library and model.endswith(".gguf"):
            found.append(measure_llama(model, text, settings, options))
    rows = [
        [
            each.model, each.quantization, each.kv_cache_dtype, f"{each.perplexity:.4f}",
            f"{each.weight_bytes / 2**20:,.0f}", f"{each.token_bytes:,}",
        ]
        for each in found
    ]  # fmt: skip
    print(facts())
    print(table(["model", "quantization", "KV cache", "perplexity", "weights, MiB", "bytes a token"], rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
