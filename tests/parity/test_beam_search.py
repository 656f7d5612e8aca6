"""Beam search finds what transformers finds, in float32: the same sequences in the same order, with the same scores."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import DEVICE
from parity_prompts import SHORT
from quire.config.arguments import EngineArguments
from quire.engine.core import EngineCore
from quire.runtime.loading.progress import silent
from quire.runtime.loading.resolve import ModelFiles, resolve_model
from quire.serving.assembly import plan_engine
from quire.serving.text.tokenizer import load_tokenizer
from quire.types.decoding import BeamRules
from quire.types.output import SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import VOCAB, tiny_config, transformers_model

pytest.importorskip("transformers")

WHOLE = os.environ.get("QUIRE_TEST_WHOLE") == "1"
RULES = [
    BeamRules(1),
    BeamRules(2, early_stopping=True),
    BeamRules(3, 0.0, "never"),
    BeamRules(4),
    BeamRules(4, 2.0, "never"),
    BeamRules(5, -1.0, early_stopping=True),
    BeamRules(7, 0.6),
    BeamRules(8, early_stopping="never"),
]
Found = list[tuple[list[int], float]]  # tokens and score, best first


def wanted(
    model: Any, prompt: Sequence[int], rules: BeamRules, length: int, end_ids: Sequence[int], **more: Any
) -> Found:
    """What transformers finds: without what it fills short answers up with."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            num_beams=rules.width,
            num_return_sequences=rules.width,
            length_penalty=rules.length_penalty,
            early_stopping=rules.early_stopping,
            eos_token_id=list(end_ids) or None,
            pad_token_id=-1,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
    answers = [[token for token in line if token >= 0] for line in out.sequences[:, len(prompt) :].tolist()]
    scores = out.sequences_scores.tolist() if rules.width > 1 else [0.0]
    return list(zip(answers, scores, strict=True))


def run(core: EngineCore, asked: dict[str, Submit]) -> dict[str, tuple[SampleEnd, ...]]:
    found = {}
    for request in asked.values():
        core.submit(request)
    while core.has_work:
        for message in core.step().finished:
            assert message.error is None, message.error
            found[message.request_id] = message.samples
        core.check()
    return found


def submit(name: str, prompt: Sequence[int], rules: BeamRules, length: int, ends: Sequence[int], **more: Any) -> Submit:
    sampling = SamplingParams(n=rules.width, max_tokens=length, **more)
    token_rules = TokenRules(end_ids=tuple(ends), eos_ids=tuple(ends))
    return Submit(name, tuple(prompt), sampling, token_rules, beam=rules)


def compare(samples: Sequence[SampleEnd], expected: Found) -> None:
    assert [list(sample.token_ids) for sample in samples] == [tokens for tokens, _ in expected]
    if len(expected) > 1:
        assert [sample.score for sample in samples] == pytest.approx(
            [score for _, score in expected], abs=1e-4, rel=1e-5
        )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = transformers_model(tiny_config())
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # so that some tokens are likelier than others
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_tiny_models_beams_are_those_of_transformers(tiny: tuple[Any, Path], block_size: int) -> None:
    model, path = tiny
    core = _core(resolve_model(str(path)), block_size, max_model_len=96)
    rng = random.Random(0)
    asked, expected = {}, {}
    penalties: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3}, {"min_tokens": 4}]
    for number, rules in enumerate(RULES):
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, 30))
        ends = rng.choice([(), (3,), tuple(range(40, 60))])
        more = penalties[number % 3] if ends or number % 3 < 2 else {}
        theirs = {"min_new_tokens" if name == "min_tokens" else name: value for name, value in more.items()}
        asked[f"r{number}"] = submit(f"r{number}", prompt, rules, 10, ends, **more)
        expected[f"r{number}"] = wanted(model, prompt, rules, 10, ends, **theirs)
    found = run(core, asked)
    core.close()
    assert found.keys() == expected.keys()
    for name, samples in found.items():
        compare(samples, expected[name])


@pytest.mark.model
def test_the_default_models_beams_are_those_of_transformers(smollm2: ModelFiles, smollm2_hf: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2)
    prompts = [tokenizer.encode(text) for text in (SHORT[:24] if WHOLE else SHORT[5:14:4])]
    length = 32 if WHOLE else 8
    model = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32).to(DEVICE).eval()
    asked, expected = {}, {}
    for number, prompt in enumerate(prompts):
        rules, ends = RULES[1:][number % (len(RULES) - 1)], (2, 198, 30)  # eos, a line, a full stop
        asked[f"r{number}"] = submit(f"r{number}", prompt, rules, length, ends)
        expected[f"r{number}"] = wanted(model, prompt, rules, length, ends)
    del model
    gc.collect()
    core = _core(smollm2, 16, max_model_len=512)
    found = run(core, asked)
    core.close()
    assert found.keys() == expected.keys()
    for name, samples in found.items():
        compare(samples, expected[name])


def _core(files: ModelFiles, block_size: int, max_model_len: int) -> EngineCore:
    arguments = EngineArguments(
        cpu_weights="float",
        dtype="float32",
        device=DEVICE,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=32,
    )
    return plan_engine(files, arguments).build("auto", silent)
