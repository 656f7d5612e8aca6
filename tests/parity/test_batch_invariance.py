"""On a CPU, tokens and logprobs are the same to the bit: whatever shares the batch, however prompts
are cut into chunks, on any number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parity_prompts import ALL
from quire import LLM, SamplingParams
from quire.kernels.native.loader import why_not_native
from quire.runtime.hardware import detect_hardware

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)),
    pytest.mark.skipif(os.environ.get("QUIRE_TEST_DEVICE", "cpu") != "cpu", reason="for CPUs"),
]
WHOLE = os.environ.get("QUIRE_TEST_WHOLE") == "1"
NEW_TOKENS, NUM_ALONE = (16, 64) if WHOLE else (6, 3)
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, min_p=0.05, seed=6, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
]
Answer = tuple[list[int], list[dict[int, float]], list[dict[int, float]]]  # tokens, their logprobs, the prompt's


def requests() -> tuple[list[str], list[SamplingParams]]:
    """64 of them: short prompts and, for chunks, a long one."""
    short = [prompt for prompt in ALL if len(prompt) < 300]
    prompts = [short[i % len(short)] + " " * (i // len(short)) for i in range(63)]
    return [max(ALL, key=len)[:900], *prompts], [SAMPLING[i % len(SAMPLING)] for i in range(64)]


@contextmanager
def opened(settings: dict[str, Any]) -> Iterator[Callable[[slice], list[Answer]]]:
    """A function that answers some of the requests, all in one batch."""
    llm, (prompts, sampling) = LLM(verbose=False, enable_prefix_caching=False, max_num_seqs=64, **settings), requests()

    def answers(which: slice) -> list[Answer]:
        outputs = llm.generate(prompts[which], sampling[which])
        return [(o.outputs[0].token_ids, _plain(o.outputs[0].logprobs), _plain(o.prompt_logprobs)) for o in outputs]

    try:
        yield answers
    finally:
        llm.close()


def _plain(entries: Any) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in entry.items()} for entry in entries or [] if entry is not None]


def same_dtypes() -> list[str]:
    """Of rows: bfloat16 where the native kernels multiply them."""
    facts = detect_hardware()
    return ["float32", "bfloat16"] if facts.tile_units or facts.has_halves("bfloat16") else ["float32"]


def check(settings: dict[str, Any]) -> None:
    with opened({**settings, "threads": 2}) as answers:
        together = answers(slice(None))
        for i in range(NUM_ALONE):
            assert answers(slice(i, i + 1)) == together[i : i + 1]
    with opened({**settings, "threads": 1, "max_num_batched_tokens": 16}) as answers:  # chunks, and one thread
        assert answers(slice(None)) == together


@pytest.mark.parametrize("dtype", same_dtypes() if REFUSAL is None else [])
def test_the_quantized_file_answers_the_same_alone_and_in_any_batch(smollm2: Any, dtype: str) -> None:
    check({"model": str(smollm2.path), "dtype": dtype})


@pytest.mark.parametrize("dtype", same_dtypes() if REFUSAL is None else [])
def test_bfloat16_weights_answer_the_same_alone_and_in_any_batch(smollm2_bf16: Path, dtype: str) -> None:
    check({"model": str(smollm2_bf16), "dtype": dtype})
