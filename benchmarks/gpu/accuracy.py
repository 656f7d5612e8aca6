"""Measures accuracy: python -m benchmarks.gpu.accuracy [--model PATH] [--device cuda] [--tokens 2000] [--json PATH]

Compares each engine with float32 on the CPU, over the repository's documentation, token by token, and greedy answers to
pieces of it: perplexity, the error of the logprobs of float32's most likely tokens, and where greedy answers diverge.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, facts, table
from quire import LLM, SamplingParams
from quire.types.output import Logprob

REFERENCE: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "bf16, fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "fp8 weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
    "fp8 weights and cache": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}
WINDOW = 500  # tokens of text per prompt
PROMPT_TOKENS = 24  # tokens of the text that a greedy answer continues
LIKELIEST = 20  # most likely tokens of float32 whose logprobs are compared

Line = dict[int, Logprob]  # the logprobs at one position, by token


@dataclass(frozen=True, slots=True)
class Reading:
    """The outputs of one engine: logprobs at every token of the text except the first of each window, and its greedy
    answers."""

    tokens: list[int]  # of the text
    lines: list[Line]
    answers: list[list[int]]
    answer_lines: list[list[Line]]

    @property
    def perplexity(self) -> float:
        own = (line[token].logprob for token, line in zip(self.tokens, self.lines, strict=True))
        return math.exp(-statistics.fmean(own))


@dataclass(frozen=True, slots=True)
class Parting:
    """The first position at which two greedy answers differ, and how far apart float32 sees the two tokens."""

    position: int
    gap: float  # difference of logits. Infinite: the token is not among the most likely


@dataclass(frozen=True, slots=True)
class Figures:
    perplexity: float
    mean_error: float | None = None
    max_error: float | None = None
    partings: tuple[Parting, ...] = ()


def text_tokens(llm: LLM, count: int) -> list[int]:
    """Return the first tokens of the documentation, in the order of its file names."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    tokens = llm.tokenizer.encode(text[: 16 * count])
    if len(tokens) < count:
        raise SystemExit(f"the documentation has {len(tokens)} tokens, {count} were asked for; lower --tokens")
    return tokens[:count]


def read(llm: LLM, text: Sequence[int], prompts: int, answer: int) -> Reading:
    """Let an engine compute the text, and continue `prompts` pieces of it by `answer` tokens each."""
    windows = [list(text[begin : begin + WINDOW]) for begin in range(0, len(text), WINDOW)]
    reading = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=LIKELIEST, detokenize=False)
    tokens, lines = [], []
    for output in llm.generate(windows, reading, use_tqdm=False):
        for token, line in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            if line is not None:
                tokens.append(token)
                lines.append(line)
    step = (len(text) - PROMPT_TOKENS) // max(1, prompts)
    pieces = [list(text[begin : begin + PROMPT_TOKENS]) for begin in range(0, step * prompts, max(1, step))]
    greedy = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, logprobs=LIKELIEST, detokenize=False)
    outputs = [output.outputs[0] for output in llm.generate(pieces, greedy, use_tqdm=False)]
    return Reading(tokens, lines, [each.token_ids for each in outputs], [each.logprobs or [] for each in outputs])


def compare(found: Reading, wanted: Reading) -> Figures:
    """Compare an engine's outputs with float32's. Errors are computed over logprobs that both engines returned."""
    errors = [
        abs(mine[token].logprob - theirs.logprob)
        for mine, line in zip(found.lines, wanted.lines, strict=True)
        for token, theirs in line.items()
        if token in mine
    ]
    partings = tuple(
        parting
        for mine, theirs, lines in zip(found.answers, wanted.answers, wanted.answer_lines, strict=True)
        if (parting := find_parting(mine, theirs, lines)) is not None
    )
    return Figures(found.perplexity, statistics.fmean(errors), max(errors), partings)


def find_parting(mine: Sequence[int], theirs: Sequence[int], lines: Sequence[Line]) -> Parting | None:
    """Return the first difference of two answers; None if they are equal. `lines` are the logprobs of `theirs`."""
    for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one != other:
            line = lines[position]
            gap = line[other].logprob - line[one].logprob if one in line else math.inf
            return Parting(position, gap)
    return None


def row(name: str, figures: Figures, prompts: int) -> list[str]:
    partings = figures.partings
    first = "-" if not partings else f"{min(parting.position for parting in partings)}"
    gap = "-" if not partings else f"{max(parting.gap for parting in partings):.3f}"
    errors = [figures.mean_error, figures.max_error]
    same = "-" if errors[0] is None else f"{prompts - len(partings)} of {prompts}"
    return [name, f"{figures.perplexity:.4f}", *("-" if e is None else f"{e:.4f}" for e in errors), same, first, gap]


def measure(model: str | None, settings: dict[str, Any], options: argparse.Namespace) -> Reading:
    usual: dict[str, Any] = {"max_model_len": WINDOW + 64, "max_num_seqs": 16, "kv_cache_memory": "256MiB"}
    with LLM(model, **(usual | settings)) as llm:
        return read(llm, text_tokens(llm, options.tokens), options.prompts, options.answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model when left out")
    parser.add_argument("--device", default="auto", help="of all engines but the reference")
    parser.add_argument("--tokens", type=int, default=2_000, help="of the text")
    parser.add_argument("--prompts", type=int, default=16, help="greedy answers")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each")
    parser.add_argument("--engines", default=";".join(ENGINES), help=f"of {'; '.join(ENGINES)}")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    names = options.engines.split(";")
    if unknown := [name for name in names if name not in ENGINES]:
        parser.error(f"unknown engines {', '.join(unknown)}; choose from {'; '.join(ENGINES)}")
    wanted = measure(options.model, REFERENCE, options)
    found = {"float32 on the CPU": Figures(wanted.perplexity)}
    for name in names:
        reading = measure(options.model, {**ENGINES[name], "device": options.device}, options)
        found[name] = compare(reading, wanted)
        print("RESULT " + json.dumps({"engine": name, **asdict(found[name])}), flush=True)
    header = ["engine", "perplexity", "mean error", "max error", "same answers", "first parting", "largest gap"]
    print(f"\n{len(wanted.tokens)} tokens, device {options.device}\n")
    print(table(header, [row(name, figures, options.prompts) for name, figures in found.items()]))
    if options.json is not None:
        figures = {"facts": facts(), "found": {name: asdict(each) for name, each in found.items()}}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
