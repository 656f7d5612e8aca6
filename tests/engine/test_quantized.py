"""The whole engine with quantized checkpoints, and with weights that it quantizes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from make_quantized import FIXTURES, TOKENS
from quire import LLM, SamplingParams
from quire.types.errors import ConfigError
from tiny_served import write_tiny_model

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1)


def open_llm(model: Path, **settings: Any) -> LLM:
    usual: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory": "1MiB"}
    return LLM(model, **(usual | settings))


@pytest.mark.parametrize("name", ["gptq-4bit", "awq", "ct-w8a8", "ct-fp8-block"])
def test_a_quantized_checkpoint_answers_alike_however_its_tokens_are_cut(name: str) -> None:
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 48}
    prompts = [{"prompt_token_ids": list(TOKENS[:count])} for count in (3, 8, 5)]
    with open_llm(FIXTURES / name, **settings) as whole:
        wanted = [whole.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    with open_llm(FIXTURES / name, **settings, max_num_batched_tokens=4) as cut:
        assert [output.outputs[0].token_ids for output in cut.generate(prompts, GREEDY)] == wanted


def test_the_plan_counts_quantized_weights_as_such() -> None:
    """`tests/unit/runtime/models/test_weight_plan.py` compares it with the bytes that are held."""
    with open_llm(FIXTURES / "gptq-4bit", skip_tokenizer_init=True, max_model_len=48) as llm:
        levels, plan = llm.model_config.levels, llm.memory_plan
        plain, total = llm.model_config.num_parameters - levels.parameters, llm.model_config.num_parameters
        is_small = 2 * plain + levels.parameters // 2 <= plan.weights <= 4 * plain + levels.num_bytes
        assert is_small or plan.weights == 4 * total  # by the CPU


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_length=128)


@pytest.mark.parametrize(("quantization", "near"), [("int8", 0.02), ("int4", 0.1)])
def test_weights_quantized_while_loading_leave_prompts_about_as_likely(
    plain: Path, quantization: str, near: float
) -> None:
    with open_llm(plain, load_format="dummy") as as_it_was:
        wanted = as_it_was.generate("a longer prompt", GREEDY)[0]
    with open_llm(plain, load_format="dummy", quantization=quantization) as small:
        found = small.generate("a longer prompt", GREEDY)[0]
    assert wanted.prompt_logprobs is not None
    assert found.prompt_logprobs is not None
    errors = [
        abs(new[token].logprob - old[token].logprob)
        for token, old, new in zip(wanted.prompt_token_ids, wanted.prompt_logprobs, found.prompt_logprobs, strict=True)
        if old is not None and new is not None
    ]
    assert 1e-6 < max(errors) < near


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int4"}, r"quantization: the checkpoint is quantized already \(gptq\); leave it out"),
        ({"quantization": "awq"}, r"quantization: the checkpoint is quantized already \(gptq\)"),
        ({"quantization": "int3"}, 'quantization: \'int3\' is unknown; use "fp8", "int8", "int4"'),
        (
            {"load_format": "dummy"},
            '"dummy" makes weights that are not quantized, and those of the checkpoint are gptq',
        ),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(FIXTURES / "gptq-4bit", skip_tokenizer_init=True, max_model_len=48, **settings)


def test_the_method_of_the_checkpoint_may_be_named() -> None:
    with open_llm(FIXTURES / "gptq-4bit", skip_tokenizer_init=True, max_model_len=48, quantization="gptq") as llm:
        assert llm.config.device.quantization is None


def test_a_method_that_a_plain_checkpoint_is_not_stored_in_is_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: the checkpoint is not stored as gptq; leave it out"):
        open_llm(plain, load_format="dummy", quantization="gptq")
