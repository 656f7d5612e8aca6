"""The whole engine over a float8 cache whose prompt chunks attend over a dequantized copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton_cases  # noqa: F401  float8 as hardware rounds it
from quire import LLM, SamplingParams
from quire.runtime.attention import registry
from quire.runtime.attention.prefill_scratch import PrefillScratch, ScratchConfig
from tiny_models import DEVICE
from tiny_served import write_tiny_model

PROMPTS = ["a prompt that takes more than one chunk", "a prompt that begins like it", "x"]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def test_answers_are_those_over_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = write_tiny_model(tmp_path, max_length=64), []
    sizes = json.loads((model / "config.json").read_text()) | {"head_dim": 16}  # the least that the kernels take
    (model / "config.json").write_text(json.dumps(sizes))
    attend = PrefillScratch.attend

    def counted(self: PrefillScratch, query: torch.Tensor, *args: object, **named: object) -> None:
        steps.append(len(query))
        attend(self, query, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillScratch, "attend", counted)
    answers = []
    for config in (None, ScratchConfig(torch.float32, least_rows=4, page=8)):
        monkeypatch.setattr(registry, "prefill_scratch", lambda *_, config=config: config)
        with LLM(
            model, load_format="dummy", dtype="float32", device=DEVICE, kv_cache_memory="1MiB", threads=1,
            kv_cache_dtype="fp8", attention_backend="triton", max_num_batched_tokens=16, block_size=4,
        ) as llm:  # fmt: skip
            answers.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
        assert bool(steps) == (config is not None)
    assert answers[0] == answers[1]
