"""Engines whose ranks are processes: tensor parallel, pipeline parallel and both give the tokens of one process, with
chunked prompts, a prefix cache, beams, drafts, samples and adapters. All of it at once: test_rank_features.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_files import make_adapter
from family_models import FamilyCase
from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from tests.families.test_expert_parallel import CHANGES as UNEVEN
from tests.families.test_stages import CHANGES

pytest.importorskip("transformers")
WHOLE = "QUIRE_TEST_WHOLE" in os.environ  # make families
SHAPES = {"tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}
NAMES = ("qwen3", "gemma3_text", "mixtral", "deepseek_v3", "qwen3_next", "llama")
MIXTURES = ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe", "qwen3_next")
QUANTIZED = Path(__file__).parents[1] / "fixtures" / "quantized" / "gptq-4bit"
USUAL: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "threads": 2, "max_num_seqs": 4,
    "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False)
WAYS = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, logprobs=2, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.2, seed=5, max_tokens=8, detokenize=False),
)


def answers(directory: Path, prompts: list[list[int]], **settings: Any) -> list[Any]:
    """Tokens of requests of all kinds at once, twice: the second time from the prefix cache."""
    with LLM(directory, **(USUAL | settings)) as llm:
        found = []
        for _ in range(2):
            outputs = llm.generate(prompts * len(WAYS), [way for way in WAYS for _ in prompts], use_tqdm=False)
            found += [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
        return found


def check(directory: Path, prompts: list[list[int]], shape: str, **settings: Any) -> None:
    tensor, pipeline = SHAPES[shape]
    alone = answers(directory, prompts, **settings)
    shared = answers(directory, prompts, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **settings)
    assert shared == alone


@pytest.mark.parametrize("shape", SHAPES if WHOLE else ["tp2", "pp2"])  # both at once: test_rank_features.py
@pytest.mark.parametrize("name", NAMES if WHOLE else NAMES[:1])
def test_ranks_give_the_tokens_of_one_process(name: str, shape: str, tmp_path: Path) -> None:
    case = FamilyCase(name, tmp_path, CHANGES.get(name, {}))
    assert case.model is not None  # it is written
    check(tmp_path, [case.prompt(length, length) for length in (30, 7, 22)], shape, num_kv_blocks=48)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_so_do_ranks_that_share_a_gpu(name: str, shape: str, tmp_path: Path) -> None:
    """Over Gloo."""
    case = FamilyCase(name, tmp_path, CHANGES.get(name, {}))
    assert case.model is not None
    prompts = [case.prompt(length, length) for length in (30, 7, 22)]
    check(tmp_path, prompts, shape, device="cuda:0", block_size=16, max_num_batched_tokens=64)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_so_does_one_rank_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Which has nothing to sum."""
    case = FamilyCase("qwen3", tmp_path)
    assert case.model is not None
    prompts, settings = [case.prompt(length, length) for length in (30, 7, 22)], {"device": "cuda", "block_size": 16}
    alone, process = (answers(tmp_path, prompts, executor=name, **settings) for name in ("single", "processes"))
    assert process == alone


@pytest.mark.parametrize("shape", ["tp2", "tp2-pp2"] if WHOLE else ["tp2-pp2"])
@pytest.mark.parametrize("name", MIXTURES if WHOLE else MIXTURES[:1])
def test_so_do_ranks_with_whole_experts(name: str, shape: str, tmp_path: Path) -> None:
    """Their number does not divide by the ranks."""
    case = FamilyCase(name, tmp_path, CHANGES.get(name, {}) | UNEVEN[name])
    assert case.model is not None
    prompts = [case.prompt(length, length) for length in (30, 7, 22)]
    alone, (tensor, pipeline) = answers(tmp_path, prompts), SHAPES[shape]
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "enable_expert_parallel": True}
    assert answers(tmp_path, prompts, **ranks) == alone


@pytest.mark.skipif(not WHOLE, reason="make families runs it")
def test_so_do_ranks_that_share_quantized_matrices() -> None:
    prompts = [[(7 * place + length) % 60 + 3 for place in range(length)] for length in (21, 9)]
    check(QUANTIZED, prompts, "tp2", max_model_len=48)


@pytest.mark.skipif(not WHOLE, reason="make families runs it")
def test_so_do_stages_that_quantize_while_loading(tmp_path: Path) -> None:
    case = FamilyCase("llama", tmp_path)
    assert case.model is not None
    check(tmp_path, [case.prompt(length, length) for length in (30, 7)], "pp2", quantization="int8")


@pytest.mark.skipif(not WHOLE, reason="make families runs it")
@pytest.mark.parametrize("shape", SHAPES)
def test_so_do_drafts_and_beams(shape: str, tmp_path: Path) -> None:
    case = FamilyCase("llama", tmp_path)
    assert case.model is not None
    prompt = case.prompt(6) * 4
    tensor, pipeline = SHAPES[shape]
    found = []
    for parallel in ({}, {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}):
        drafts = {"method": "ngram", "num_speculative_tokens": 4}
        with LLM(tmp_path, **(USUAL | parallel), speculative_config=drafts) as llm:
            (drafted,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            (searched,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=8), use_tqdm=False)
            found.append([list(drafted.outputs[0].token_ids), *(list(each.tokens) for each in searched.sequences)])
    assert found[1] == found[0]


@pytest.mark.skipif(not WHOLE, reason="make families runs it")
@pytest.mark.parametrize("shape", SHAPES)
def test_so_do_adapters(shape: str, tmp_path: Path) -> None:
    case = FamilyCase("qwen3", tmp_path / "model")
    adapter = make_adapter(tmp_path, case.model)
    tensor, pipeline = SHAPES[shape]
    prompt, found = case.prompt(17), []
    for parallel in ({}, {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}):
        with LLM(case.directory, **(USUAL | parallel), enable_lora=True) as llm:
            request = LoRARequest("mine", 1, str(adapter))
            changed = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=request)
            plain = llm.generate([prompt], GREEDY, use_tqdm=False)
            found.append([list(output[0].outputs[0].token_ids) for output in (changed, plain)])
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]
