"""Runs an lm-eval task with `quire serve` and with transformers: the same weights must give the same scores.

    python -m benchmarks.lm_eval_parity                 # the default model and `benchmarks/lm_eval_task`
    python -m benchmarks.lm_eval_parity --model FOLDER  # a folder or a GGUF file, in float32 on both sides

Needs `pip install 'lm-eval[api,hf]'`. lm-eval uses the server like any client (`local-completions`: context and
continuation as one prompt of token ids, echoed with logprobs), and transformers in this process (`hf`). Fails unless
the scores are equal and every log-likelihood agrees within the tolerance. Run it from the root of the repository,
because the task refers to its questions by path.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import facts, publish
from benchmarks.serving.server import Contestant, running

FOLDER = Path(__file__).parent / "lm_eval_task"
NAME = "scored"
FLAGS = "--served-model-name {name} --dtype float32 --device cpu --max-model-len 1024"
Samples = dict[tuple[int, int], tuple[float, bool]]  # by question and answer: log-likelihood, and whether it is greedy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a GGUF file (the default model)")
    parser.add_argument("--task", default="plain_facts", help="a task of lm-eval, or of benchmarks/lm_eval_task")
    parser.add_argument("--limit", type=int, help="only so many questions")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of a log-likelihood (0.01)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    where, path = facts(), _find(args.model)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _save_tokenizer(path, Path(folder))
        served, served_seconds = _timed(_by_server, path, tokenizer, args)
        known, known_seconds = _timed(_by_transformers, path, tokenizer, args)
    ours, theirs = _samples(served, args.task), _samples(known, args.task)
    worst = max(abs(ours[place][0] - theirs[place][0]) for place in theirs)
    metrics = [name for name, value in known["results"][args.task].items() if isinstance(value, float)]
    rows = [
        [name, *(f"{found['results'][args.task][name]:.4f}" for found in (served, known))]
        for name in metrics if "stderr" not in name
    ]  # fmt: skip
    rows.append(["seconds", f"{served_seconds:.1f}", f"{known_seconds:.1f}"])
    publish(f"{args.task}, {path.name}, float32", ["", "quire serve", "transformers"], rows, where)
    print(f"{len(theirs)} log-likelihoods; the largest difference is {worst:.6f}")
    same_scores = all(served["results"][args.task][name] == known["results"][args.task][name] for name in metrics)
    if ours.keys() != theirs.keys() or worst > args.tolerance or not same_scores:
        print(f"FAILED: scores {'agree' if same_scores else 'differ'}, tolerance {args.tolerance}", file=sys.stderr)
        return 1
    return 0


def _find(model: str | None) -> Path:
    from quire.runtime.loading.resolve import resolve_model

    return resolve_model(model, offline=True).path


def _source(path: Path) -> dict[str, Any]:
    """Return the name by which transformers loads a model: its folder, and the GGUF file in it."""
    return {"pretrained": str(path)} if path.is_dir() else {"pretrained": str(path.parent), "gguf_file": path.name}


def _save_tokenizer(path: Path, folder: Path) -> str:
    from transformers import AutoTokenizer

    source = _source(path)
    AutoTokenizer.from_pretrained(source.pop("pretrained"), **source).save_pretrained(folder)
    return str(folder)


def _timed(run: Any, *arguments: Any) -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    found = run(*arguments)
    return found, time.perf_counter() - start


def _by_server(path: Path, tokenizer: str, args: argparse.Namespace) -> dict[str, Any]:
    flags = FLAGS.format(name=NAME) + f" --threads {args.threads}"
    command = f"{shlex.quote(sys.executable)} -m quire serve {shlex.quote(str(path))} --port {{port}} {flags}"
    with running(Contestant("quire", command), 300.0) as server:
        asked = {
            "model": NAME, "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "huggingface",
            "tokenizer": tokenizer, "tokenized_requests": True, "max_length": 1_024, "batch_size": 16,
        }  # fmt: skip
        return _evaluate("local-completions", asked, args)


def _by_transformers(path: Path, tokenizer: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(args.threads)
    asked = {**_source(path), "tokenizer": tokenizer, "dtype": "float32", "device": "cpu", "batch_size": 1}
    return _evaluate("hf", asked, args)


def _evaluate(kind: str, asked: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=kind, model_args=asked, tasks=[args.task], limit=args.limit, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(FOLDER)),
    )  # fmt: skip
    return found


def _samples(found: dict[str, Any], task: str) -> Samples:
    return {
        (sample["doc_id"], place): (float(one[0]), bool(one[1]))
        for sample in found["samples"][task]
        for place, one in enumerate(sample["filtered_resps"])
    }


if __name__ == "__main__":
    sys.exit(main())
