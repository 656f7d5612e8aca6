"""Measures the cost of LoRA adapters: a batch in which every row has a different adapter, and the same batch without.

    python -m benchmarks.lora                                            # 64 adapters of rank 16, the default model
    python -m benchmarks.lora --adapters 8 --rank 64 --dtype bfloat16
    python -m benchmarks.lora --targets q_proj,v_proj                    # the modules that PEFT adapts by default
    python -m benchmarks.lora --threads 1 --cpu-seconds                  # on a machine with other work
    python -m benchmarks.lora --device cuda --model llama-3.1-8b         # random weights on a GPU

Adapters with random values are written in PEFT's format to a temporary folder, and used by `lora_request`. Both cases
run interleaved on one engine, with the same prompts of random tokens, which change in each round; end-of-text is
ignored. Prints a RESULT line per round and case, then a table of medians without the first round, which loads the
adapters. Goal: 75 % of the speed without adapters; --strict exits 1 below it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.structured import load_random
from benchmarks.preemption import SHAPES
from benchmarks.report import facts, publish, save
from quire import LLM, LoRARequest, SamplingParams

PLAIN, ADAPTED, GOAL = "without adapters", "with adapters", 0.75
Shapes = dict[str, tuple[int, int]]  # inputs and outputs of each module of a layer, by its name


def target_shapes(llm: LLM) -> Shapes:
    """Return the linear modules of a layer, with the names of Llama and similar models."""
    model = llm.model_config
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.heads
    return {
        "self_attn.q_proj": (hidden, heads.query_size), "self_attn.k_proj": (hidden, heads.kv_size),
        "self_attn.v_proj": (hidden, heads.kv_size), "self_attn.o_proj": (heads.query_size, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip


def write_adapter(folder: Path, shapes: Shapes, num_layers: int, rank: int, seed: int) -> Path:
    """Write a PEFT folder of random matrices, small enough that the model's outputs stay finite."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(num_layers):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = (a / inputs**0.5).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (b / 100).bfloat16()
    folder.mkdir(parents=True)
    names = sorted(name.rpartition(".")[2] for name in shapes)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def open_model(options: argparse.Namespace) -> LLM:
    """Load the named model: a shape with random weights and invented words, or one with files."""
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "threads": options.threads,
        "max_model_len": options.tokens_in + options.tokens_out,
        "max_num_seqs": options.adapters,
        "enable_lora": True,
        "max_loras": options.adapters,
        "max_lora_rank": options.rank,
    }
    if options.model in SHAPES:
        return load_random(SHAPES[options.model], None, **settings)
    return LLM(options.model, verbose=False, **settings)


def tokens_per_second(
    llm: LLM,
    prompts: list[list[int]],
    max_tokens: int,
    loras: Sequence[LoRARequest] | None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Answer all prompts at once. Raises if one of them is not answered in full."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()  # both cases of a round have the same prompts
    begin = clock()
    answers = llm.generate(prompts, sampling, use_tqdm=False, lora_request=None if loras is None else list(loras))
    seconds = clock() - begin
    found, wanted = sum(len(answer.outputs[0].token_ids) for answer in answers), len(prompts) * max_tokens
    if found != wanted:
        raise SystemExit(f"{found} tokens came back, {wanted} were asked for")
    return found / seconds


def measure(llm: LLM, options: argparse.Namespace, loras: Sequence[LoRARequest]) -> dict[str, list[float]]:
    """Return tokens/s of both cases, interleaved, including a first round that does not count."""
    found: dict[str, list[float]] = {PLAIN: [], ADAPTED: []}
    most, clock = min(9_000, llm.model_config.vocab_size - 1), time.perf_counter
    if options.cpu_seconds:
        clock = time.process_time
    for repeat in range(options.repeats + 1):
        rng = random.Random(options.seed + repeat)
        prompts = [[rng.randint(10, most) for _ in range(options.tokens_in)] for _ in loras]
        for case, values in found.items():
            chosen = loras if case == ADAPTED else None
            values.append(tokens_per_second(llm, prompts, options.tokens_out, chosen, clock))
            print("RESULT " + json.dumps({"work": case, "rep": repeat, "out_tok_s": round(values[-1], 1)}), flush=True)
    return found


def ratios(rounds: dict[str, list[float]]) -> list[float]:
    """Return the speed with adapters divided by that without, for each round except the first."""
    return [one / plain for one, plain in zip(rounds[ADAPTED][1:], rounds[PLAIN][1:], strict=True)]


def rows(rounds: dict[str, list[float]]) -> list[list[str]]:
    each, medians = ratios(rounds), {case: statistics.median(values[1:]) for case, values in rounds.items()}
    share, spread = statistics.median(each), f"{100 * min(each):.1f} - {100 * max(each):.1f} %"
    return [
        [PLAIN, f"{medians[PLAIN]:,.0f}", "100.0 %", "-"],
        [ADAPTED, f"{medians[ADAPTED]:,.0f}", f"{100 * share:.1f} %", spread],
    ]


def main() -> None:
    options = _parse()
    where = facts()
    with open_model(options) as llm, tempfile.TemporaryDirectory() as folder:
        shapes = chosen_shapes(target_shapes(llm), options.targets)
        numbers = range(options.adapters)
        layers = llm.model_config.num_layers
        paths = [write_adapter(Path(folder, str(one)), shapes, layers, options.rank, seed=one) for one in numbers]
        loras = [LoRARequest(f"adapter-{one}", one + 1, str(path)) for one, path in enumerate(paths)]
        rounds = measure(llm, options, loras)
    what = f"{options.adapters} adapters of rank {options.rank} on {options.targets or 'all linear modules'}"
    shape = f"{options.tokens_in} in, {options.tokens_out} out, {options.repeats} rounds"
    shape += ", by CPU seconds" if options.cpu_seconds else ""
    title = f"LoRA: {options.model or 'the default model'} on {options.device}, {what}, {shape}"
    publish(title, ["case", "out tok/s", "of plain", "of plain, by round"], rows(rounds), where)
    save(options.out, title, where, {"rounds": rounds, "ratios": ratios(rounds)})
    if options.strict and statistics.median(ratios(rounds)) < GOAL:
        sys.exit(1)


def chosen_shapes(shapes: Shapes, targets: str | None) -> Shapes:
    """Return the shapes of the named modules, or all."""
    if targets is None:
        return shapes
    wanted = targets.split(",")
    if unknown := [name for name in wanted if not any(key.endswith(f".{name}") for key in shapes)]:
        raise SystemExit(f"--targets: no {', '.join(unknown)}; there are {', '.join(shapes)}")
    return {key: shape for key, shape in shapes.items() if key.rpartition(".")[2] in wanted}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model",
        help=f"random weights of a shape ({', '.join(SHAPES)}), or a path or name of Llama's family; default: the "
        "embedded default model on a CPU, qwen3-0.6b on a GPU",
    )
    parser.add_argument("--adapters", type=int, default=64, help="and rows, one for each (64)")
    parser.add_argument("--rank", type=int, default=16, help="of every adapter (16)")
    parser.add_argument("--targets", help="modules that adapters change, as q_proj,v_proj; default: all")
    parser.add_argument("--tokens-in", type=int, default=16, help="of each request (16)")
    parser.add_argument("--tokens-out", type=int, default=128, help="of each request (128)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the first, which does not count (5)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="cores for the model; default: as quire chooses")
    parser.add_argument("--cpu-seconds", action="store_true", help="count CPU time: for a machine with other work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strict", action="store_true", help="exit 1 below 75 %% of the batch without adapters")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    if options.model is None and options.device == "cuda":
        options.model = "qwen3-0.6b"
    return options


if __name__ == "__main__":
    main()
