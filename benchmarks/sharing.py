"""Measures the KV memory saved because samples and beams of one request share blocks, as in the PagedAttention paper.

    python -m benchmarks.sharing --out sharing.json --plot sharing.svg
    python -m benchmarks.sharing --questions question.jsonl          # your own prompts: JSON lines with `turns`

A real model answers short prompts (an instruction) and long ones (an instruction and a page of text), with n = 2, 4, 6
samples or beams. The saved share is 1 - blocks in use / blocks that the sequences would need without sharing, summed
over all steps. The paper, with a 13B model, reports 6-10 % on short and 16-30 % on long prompts when sampling, and
38-66 % with beams.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.plot import Bars, save_plot
from benchmarks.report import ROOT, facts, publish, save
from quire.config.arguments import EngineArguments
from quire.engine.core import EngineCore
from quire.runtime.loading.progress import silent
from quire.runtime.loading.resolve import resolve_model
from quire.serving.assembly import plan_engine
from quire.serving.text.tokenizer import Tokenizer, load_tokenizer
from quire.types.decoding import BeamRules
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

TASKS = (
    "Explain to a child why the sky is blue.",
    "Write a short letter that thanks a neighbour for watering the garden.",
    "List five things to do on a rainy day in a small town.",
    "Describe how bread is made, from the field to the table.",
    "Give three reasons for and three against working at night.",
    "Tell a short story about a clock that runs backwards.",
    "What should a traveller know before crossing a desert?",
    "Compare a bicycle and a car as a way to get to work.",
)
PAGE_TOKENS = 160  # tokens of the long prompts, the mean of ShareGPT's
COUNTS = (2, 4, 6)
PAPER = {("short", "sampling"): "6-10 %", ("long", "sampling"): "16-30 %"} | {
    (prompts, "beam search"): "38-66 %" for prompts in ("short", "long")
}


@dataclass(frozen=True, slots=True)
class Saving:
    """Blocks x steps, of one run."""

    prompts: str
    way: str
    count: int
    mean_prompt: float
    mean_output: float
    held: int  # each block counted once per sequence that holds it
    used: int

    @property
    def saved(self) -> float:
        return 1 - self.used / self.held


def measure(
    core: EngineCore, name: str, prompts: Sequence[Sequence[int]], way: str, count: int, max_tokens: int
) -> Saving:
    """Answer all prompts at once and count blocks after every step."""
    searches = way == "beam search"
    sampling = SamplingParams(n=count, temperature=0.0 if searches else 1.0, max_tokens=max_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        beam = BeamRules(count) if searches else None
        core.submit(Submit(f"{name} {way} {count} {number}", tuple(prompt), sampling, beam=beam))
    held = used = outputs = 0
    while core.has_work:
        out = core.step()
        holders = core.block_map().holders
        held += sum(holders)
        used += sum(number > 0 for number in holders)
        for end in out.finished:
            if end.error is not None:
                raise SystemExit(f"{end.request_id} failed: {end.error}")
            outputs += sum(len(sample.token_ids) for sample in end.samples)
    core.reset_cache()
    mean_prompt = sum(len(prompt) for prompt in prompts) / len(prompts)
    return Saving(name, way, count, mean_prompt, outputs / len(prompts) / count, held, used)


def read_prompts(tokenizer: Tokenizer, questions: Path | None, number: int) -> dict[str, list[list[int]]]:
    """Short and long prompts, as token ids."""
    tasks = list(TASKS)
    if questions is not None:
        tasks = [json.loads(line)["turns"][0] for line in questions.read_text().splitlines() if line.strip()]
    tasks = [f"Answer the task below in plain words.\n{tasks[place % len(tasks)]}" for place in range(number)]
    text = tokenizer.encode((ROOT / "docs" / "architecture.md").read_text(), add_special_tokens=False)
    short = [tokenizer.encode(task, add_special_tokens=False) for task in tasks]
    pages = [text[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS] for place in range(number)]
    pairs = zip(pages, short, strict=True)
    return {"short": short, "long": [page[: PAGE_TOKENS - len(task)] + task for page, task in pairs]}


def bars(savings: Sequence[Saving]) -> list[Bars]:
    """Return one panel for the prompts, with a bar for each method and count."""
    return [
        Bars(
            f"KV memory saved by sharing, {prompts} prompts",
            ("saved",),
            {f"{one.way.split()[0]} {one.count}": (one.saved,) for one in savings if one.prompts == prompts},
        )
        for prompts in dict.fromkeys(one.prompts for one in savings)
    ]


def main() -> None:
    arguments, where = _parse(), facts()
    files = resolve_model(arguments.model, progress=silent)
    settings = EngineArguments(
        block_size=arguments.block_size, dtype=arguments.dtype, device=arguments.device, enable_prefix_caching=False
    )
    core = plan_engine(files, settings).build("auto", silent)
    prompts = read_prompts(load_tokenizer(files), arguments.questions, arguments.requests)
    lengths = {"short": arguments.short_tokens, "long": arguments.long_tokens}
    savings = [
        measure(core, name, prompts[name], way, count, lengths[name])
        for name in ("short", "long")
        for way in ("sampling", "beam search")
        for count in COUNTS
    ]
    core.close()
    title = f"KV memory saved by sharing, block size {arguments.block_size}, {arguments.requests} requests at once"
    header = ["prompts", "way", "sequences", "tokens in", "tokens out", "saved", "the paper"]
    rows = [
        [
            one.prompts, one.way, one.count, f"{one.mean_prompt:.0f}", f"{one.mean_output:.0f}", f"{one.saved:.1%}",
            PAPER[one.prompts, one.way],
        ]
        for one in savings
    ]  # fmt: skip
    publish(title, header, rows, where)
    save(arguments.out, title, where, {"savings": [asdict(one) | {"saved": one.saved} for one in savings]})
    save_plot(arguments.plot, bars(savings))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--questions", type=Path, help="JSON lines, prompts are the first `turns`; default: built in")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--short-tokens", type=int, default=58, help="tokens out of short prompts (Alpaca's mean)")
    parser.add_argument("--long-tokens", type=int, default=338, help="tokens out of long prompts (ShareGPT's mean)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
