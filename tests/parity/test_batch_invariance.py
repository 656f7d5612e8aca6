"""On a CPU, tokens and logprobs are the same to the bit: whatever shares the batch, however prompts are cut into
chunks, whether a prefix was cached, on any number of threads. For the whole default model in the formats that it is
mostly run in, and for its first layers in every format that the kernels multiply by and every kind of cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cut_models import CutModel
from devices import DEVICE
from parity_prompts import LONG, SHORT
from quire import LLM, SamplingParams
from quire.kernels.native.loader import why_not_native
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.types import LEVEL_FORMS
from quire.runtime.loading.resolve import ModelFiles
from quire.runtime.quantized_checkpoints.checkpoint import Recipe, write_quantized
from quire.serving.text.tokenizer import load_tokenizer

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)),
    pytest.mark.skipif(DEVICE != "cpu", reason="for CPUs"),
]
WHOLE = os.environ.get("QUIRE_TEST_WHOLE") == "1"
BATCH = 64
LAYERS, TOKENS = 2, 4096  # of the model, where it is cut
LONGEST = 300  # tokens of a prompt: attention is cut into pieces of 256
NEW_TOKENS, NUM_ALONE = (16, BATCH) if WHOLE else (3, 2)
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, min_p=0.05, seed=6, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
]
Answer = tuple[list[int], list[dict[int, float]], list[dict[int, float]]]  # tokens, their logprobs, the prompt's


@dataclass(frozen=True)
class Requests:
    """64 prompts as token ids, the first two of them long, each with its sampling parameters."""

    prompts: Sequence[list[int]]

    @classmethod
    def of(cls, model: ModelFiles, tokens: int) -> Requests:
        """Of tokens below `tokens`."""
        tokenizer = load_tokenizer(model)
        texts = [*(text * 3 for text in LONG), *(SHORT[i % len(SHORT)] + f" {i}" for i in range(BATCH - len(LONG)))]
        return cls([[token % tokens for token in tokenizer.encode(text)][:LONGEST] for text in texts])

    def answers(self, llm: LLM, which: range, salt: str) -> tuple[list[Answer], int]:
        """What the model says to some of them in one batch, and how many tokens of them were cached."""
        prompts = [{"prompt_token_ids": self.prompts[i], "cache_salt": salt} for i in which]
        outputs = llm.generate(prompts, [SAMPLING[i % len(SAMPLING)] for i in which])
        found = [(o.outputs[0].token_ids, _plain(o.outputs[0].logprobs), _plain(o.prompt_logprobs)) for o in outputs]
        return found, sum(output.num_cached_tokens or 0 for output in outputs)


def _plain(entries: Any) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in entry.items()} for entry in entries or [] if entry is not None]


@contextmanager
def opened(**settings: Any) -> Iterator[LLM]:
    llm = LLM(verbose=False, max_num_seqs=BATCH, skip_tokenizer_init=True, **settings)
    try:
        yield llm
    finally:
        llm.close()


def check(requests: Requests, **settings: Any) -> None:
    """A batch against each of some requests alone, with and without a cached prefix; then on another number of threads,
    in chunks of other sizes."""
    with opened(**settings, threads=2) as llm:
        together, _ = requests.answers(llm, range(BATCH), "together")
        for i in range(NUM_ALONE):
            alone, cached = requests.answers(llm, range(i, i + 1), f"alone {i}")
            assert (alone, cached) == (together[i : i + 1], 0)
        second, cached = requests.answers(llm, range(1, 5), "together")
        assert second == together[1:5]
        assert cached > 0
    with opened(**settings, threads=1, max_num_batched_tokens=24, enable_prefix_caching=False) as llm:
        assert requests.answers(llm, range(BATCH), "")[0] == together


@pytest.fixture(scope="module")
def cut(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> CutModel:
    return CutModel(smollm2.path, LAYERS, TOKENS, tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def cut_requests(smollm2: ModelFiles) -> Requests:
    return Requests.of(smollm2, TOKENS)


@pytest.fixture(scope="module")
def whole_requests(smollm2: ModelFiles) -> Requests:
    return Requests.of(smollm2, 49152)


def test_the_whole_quantized_file_answers_the_same_alone_and_in_any_batch(
    smollm2: ModelFiles, whole_requests: Requests
) -> None:
    check(whole_requests, model=str(smollm2.path))


def test_the_whole_model_in_bfloat16_answers_the_same_alone_and_in_any_batch(
    smollm2_bf16: Path, whole_requests: Requests
) -> None:
    check(whole_requests, model=str(smollm2_bf16))


def k_medium(name: str) -> str:
    """Types as a Q4_K_M file mixes them: parts of one product differ."""
    return "Q6_K" if any(part in name for part in ("token_embd", "attn_v", "ffn_down")) else "Q4_K"


@pytest.mark.parametrize("kind", ["F32", *LEVEL_FORMS, "Q4_K_M"])
def test_every_type_of_a_gguf_file_answers_the_same_alone_and_in_any_batch(
    kind: str, cut: CutModel, cut_requests: Requests
) -> None:
    file = cut.gguf(kind, k_medium if kind == "Q4_K_M" else lambda _: kind)
    check(cut_requests, model=str(file))


@pytest.mark.parametrize(
    ("dtype", "cpu_weights"),
    [("float32", "integer16"), ("float32", "float"), ("bfloat16", "integer"), ("bfloat16", "float")],
)
def test_rows_of_any_bits_answer_the_same_alone_and_in_any_batch(
    dtype: str, cpu_weights: str, cut: CutModel, cut_requests: Requests
) -> None:
    file = cut.folder / "rows.gguf"
    if not file.exists():
        cut.gguf("rows", k_medium)
    check(cut_requests, model=str(file), dtype=dtype, cpu_weights=cpu_weights)


def quantized(method: Any) -> Callable[[CutModel], Path]:
    """By `quire quantize`."""

    def write(cut: CutModel) -> Path:
        folder = cut.folder / f"written-{method}"
        write_quantized(files_at(cut.plain), folder, Recipe(method), torch.device("cpu"))
        return folder

    return write


CHECKPOINTS: dict[str, Callable[[CutModel], Path]] = {
    "gptq": lambda cut: cut.gptq("gptq", 4),
    "gptq-act-order": lambda cut: cut.gptq("gptq-act-order", 4, in_order=False),
    "gptq-8bit": lambda cut: cut.gptq("gptq-8bit", 8),
    "awq": lambda cut: cut.awq("awq"),
    "int4": quantized("int4"),
    "int8": quantized("int8"),
    "fp8": quantized("fp8"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_checkpoints_answer_the_same_alone_and_in_any_batch(
    name: str, cut: CutModel, cut_requests: Requests
) -> None:
    check(cut_requests, model=str(CHECKPOINTS[name](cut)))


PLAIN: list[dict[str, str]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"quantization": "int4"},
    {"quantization": "int8"},
    {"quantization": "fp8"},
    *(
        {"dtype": dtype, "kv_cache_dtype": kind}
        for dtype in ("float32", "bfloat16")
        for kind in ("fp8", "int8", "int4")
    ),
    {"dtype": "float16", "kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize("settings", PLAIN, ids=lambda settings: "-".join(settings.values()))
def test_every_precision_and_cache_answers_the_same_alone_and_in_any_batch(
    settings: dict[str, str], cut: CutModel, cut_requests: Requests
) -> None:
    check(cut_requests, model=str(cut.plain), **settings)
