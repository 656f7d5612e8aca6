"""Times structured output on a GPU: python -m benchmarks.gpu.structured --model qwen3-0.6b [--tokenizer FILE]

256 requests at once, 64 tokens in and 128 out at temperature 0.6, of which none, one or all follow a regex or a JSON
schema; random weights of the named shape with a vocabulary of 49,152 ids. Each case is repeated in turn with other
prompts; a RESULT line per repeat, the first of which compiles and captures, then a table of medians without the first.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import MODELS, BenchModel
from benchmarks.gpu.tokenizer import write_tokenizer
from benchmarks.report import table
from quire import LLM, SamplingParams

VOCABULARY = 49_152
REQUESTS, TOKENS_IN, TOKENS_OUT = 256, 64, 128
RECORD = {  # ten fields, so that with random weights answers are longer than 128 tokens
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "height": {"type": "number"},
        "is_member": {"type": "boolean"},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "notes": {"type": "string"},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": [
        "name", "age", "email", "height", "is_member", "colour", "tags", "address", "notes", "score",
    ],
    "additionalProperties": False,
}  # fmt: skip
STRUCTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "regex": {"regex": "[a-z ]{200,4000}"},
    "json": {"json": RECORD},
}
CASES = (("plain", 0), ("regex", 1), ("regex", REQUESTS), ("json", 1), ("json", REQUESTS))


def load_random(model: BenchModel, tokenizer: Path | None, **settings: Any) -> LLM:
    """Load random weights of a shape, with a vocabulary of 49,152 ids; without a tokenizer.json its words are
    invented."""
    small = replace(model, config=model.config | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2})
    with tempfile.TemporaryDirectory() as folder:
        path = small.write(Path(folder))
        if tokenizer is None:
            write_tokenizer(path / "tokenizer.json", VOCABULARY)
        else:
            shutil.copy(tokenizer, path / "tokenizer.json")
        return LLM(path, load_format=model.load_format, **settings)


def tokens_per_second(llm: LLM, kind: str, count: int, rng: random.Random) -> tuple[float, int]:
    """Run the requests, of which the first `count` are structured. Also returns how many tokens were generated."""
    prompts = [[rng.randint(10, 9_000) for _ in range(TOKENS_IN)] for _ in range(REQUESTS)]
    usual: dict[str, Any] = {"temperature": 0.6, "max_tokens": TOKENS_OUT, "ignore_eos": True}
    sampling = [
        SamplingParams(**usual, structured_outputs=STRUCTURES[kind] if place < count else None)
        for place in range(REQUESTS)
    ]
    begin = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return num_tokens / seconds, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json of at most 49,152 ids; default: made-up words")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": REQUESTS}
    llm = load_random(MODELS[options.model], options.tokenizer, **settings)
    rng, found = random.Random(1), dict[str, list[float]]()
    for repeat in range(options.repeats):
        for kind, count in CASES:
            title = kind if kind == "plain" else f"{count} {kind}"
            value, num_tokens = tokens_per_second(llm, kind, count, rng)
            found.setdefault(title, []).append(value)
            result = {
                "model": options.model,
                "work": title,
                "rep": repeat,
                "tokens": num_tokens,
                "out_tok_s": round(value),
            }
            print("RESULT " + json.dumps(result | {"out_tok_s": round(value)}), flush=True)
    medians = {title: statistics.median(values[1:] or values) for title, values in found.items()}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{options.model}, {REQUESTS} requests, {TOKENS_IN} in, {TOKENS_OUT} out, on {where}\n")
    lines = [
        [title, f"{value:,.0f}", f"{100 * value / medians['plain']:.1f} %", f"{found[title][0]:,.0f}"]
        for title, value in medians.items()
    ]
    print(table(["structured rows", "out tok/s", "of plain", "first run"], lines))


if __name__ == "__main__":
    main()
