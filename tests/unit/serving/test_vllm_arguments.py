"""Scripts written for vLLM: what they pass by habit is accepted, what would change an answer is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.runtime.loading import resolve as resolve_module
from quire.serving.vllm_arguments import NO_EFFECT, translate_arguments
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.sampling import SamplingParams
from quire.types.vllm_sampling import RequestOutputKind
from tests.unit.serving.conftest import MakeLLM

HABITS: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "trust_remote_code": False,
    "dtype": "auto",
    "seed": None,
    "enforce_eager": False,
    "quantization": None,
    "tokenizer_mode": "auto",
    "enable_lora": False,
    "fully_sharded_loras": False,
    "enable_chunked_prefill": True,
    "disable_log_stats": True,
    "disable_custom_all_reduce": False,
    "max_seq_len_to_capture": 8192,
    "cpu_offload_gb": 0,
    "hf_overrides": {},
    "task": "generate",
}


def echo(prompt: str, index: int) -> str:
    return f"<{prompt}>"


def test_arguments_that_ask_for_nothing_are_accepted_silently(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(echo, **HABITS)
    assert llm.generate("a", SamplingParams(max_tokens=9))[0].outputs[0].text == "<a>"
    assert llm.config == make_llm(echo).config
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("trust_remote_code", True, "no code from a model's files is ever run"),
        ("compilation_config", 3, "CUDA graphs"),
        ("gpu_memory_utilization", 0.5, "kv_cache_memory"),
        ("served_model_name", "x", "quire serve"),
    ],
)
def test_an_argument_that_only_tunes_is_accepted_with_a_warning(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture, name: str, value: object, shown: str
) -> None:
    llm = make_llm(echo, **{name: value})
    assert name in caplog.text
    assert shown in caplog.text
    assert llm.generate("a", SamplingParams(max_tokens=9))[0].outputs[0].text == "<a>"


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("data_parallel_size", 2, "one server per replica"),
        ("data_parallel_size", True, "one server per replica"),
        ("decode_context_parallel_size", 2, "tensor_parallel_size"),
        ("lora_dtype", "float32", "in the dtype of the model"),
        ("enable_chunked_prefill", False, "always computed in chunks"),
        ("hf_overrides", {"rope_theta": 1}, "config.json"),
        ("tokenizer_mode", "slow", '"auto"'),
        ("runner", "pooling", "--task embed"),
        ("hf_token", "secret", "hf auth login"),
    ],
)
def test_an_argument_that_would_change_the_answer_is_refused_with_what_to_use(
    name: str, value: object, fix: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: ") as error:
        translate_arguments({name: value})
    assert fix in error.value.fix


def test_other_names_of_the_same_setting_are_translated() -> None:
    given = {"kv_cache_memory_bytes": 2**30, "max_model_len": 64, "model": "m"}
    assert translate_arguments(given) == {"kv_cache_memory": 2**30, "max_model_len": 64, "model": "m"}
    assert translate_arguments({"num_gpu_blocks_override": 7}) == {"num_kv_blocks": 7}
    assert translate_arguments({"distributed_executor_backend": "mp"}) == {"executor": "mp"}
    assert translate_arguments({"tensor_parallel_size": None, "distributed_executor_backend": None}) == {}
    with pytest.raises(ConfigError, match="^num_gpu_blocks_override: is another name of num_kv_blocks"):
        translate_arguments({"num_gpu_blocks_override": 7, "num_kv_blocks": 8})


def test_a_torch_dtype_is_taken_by_its_name() -> None:
    torch = pytest.importorskip("torch")
    assert translate_arguments({"dtype": torch.bfloat16}) == {"dtype": "bfloat16"}


def test_a_revision_becomes_part_of_the_hub_name() -> None:
    assert translate_arguments({"model": "org/name", "revision": "v1"})["model"] == "org/name@v1"
    assert translate_arguments({"model": "org/name:q.gguf", "revision": "v1"})["model"] == "org/name@v1:q.gguf"
    assert translate_arguments({"model": "qwen3-0.6b", "revision": "main"})["model"] == "Qwen/Qwen3-0.6B@main"
    assert translate_arguments({"model": "org/name@v1", "revision": "v1"})["model"] == "org/name@v1"
    assert translate_arguments({"model": "org/name", "revision": None}) == {"model": "org/name"}
    found = translate_arguments({"model": "m", "tokenizer": "org/t", "tokenizer_revision": "v2"})
    assert found == {"model": "m", "tokenizer": "org/t@v2"}
    with pytest.raises(ConfigError, match="^revision: is for a model on the hub"):
        translate_arguments({"model": "./here.gguf", "revision": "v1"})
    with pytest.raises(ConfigError, match="^revision: .*the name says"):
        translate_arguments({"model": "org/name@v2", "revision": "v1"})
    assert resolve_module.hub_repository("smollm2-135m-instruct") is None


def test_a_misspelt_argument_is_answered_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"^tensor_paralel_size: .*did you mean tensor_parallel_size\?"):
        translate_arguments({"tensor_paralel_size": 1})
    with pytest.raises(ConfigError, match=r"^max_num_seq: .*did you mean max_num_seqs\?"):
        translate_arguments({"max_num_seq": 1})


def test_every_argument_without_effect_has_advice_and_a_neutral_value() -> None:
    assert all(entry.advice and entry.neutral[0] is None for entry in NO_EFFECT.values())
    assert translate_arguments(dict.fromkeys(NO_EFFECT)) == {}


def test_calls_take_vllms_arguments_that_ask_for_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    sampling = SamplingParams(max_tokens=99)
    assert llm.generate("a", sampling, lora_request=None, tokenization_kwargs=None)[0].outputs[0].text == "<a>"
    message = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(message, sampling, chat_template_content_format="auto", mm_processor_kwargs=None)
    assert output.outputs[0].text == "<user:hello\nbot:>"
    with pytest.raises(InvalidRequest, match="^lora_request: must be a LoRARequest, got str"):
        llm.generate("a", sampling, lora_request="adapter")
    with pytest.raises(InvalidRequest, match="^prompt_token_idx: is not an argument"):
        llm.generate("a", sampling, prompt_token_idx=[1])  # type: ignore[call-arg]


def test_sampling_params_take_vllms_fields_that_ask_for_nothing() -> None:
    habits = SamplingParams(
        logits_processors=None, truncate_prompt_tokens=None, extra_args=None, flat_logprobs=False, skip_clone=True
    )  # type: ignore[call-arg]
    assert habits == SamplingParams()
    guided = SamplingParams(guided_decoding={"choice": ["a", "b"]})  # type: ignore[call-arg]
    assert guided == SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert SamplingParams.from_optional(temperature=None, top_p=0.5) == SamplingParams(top_p=0.5)
    assert SamplingParams(top_p=0.5).clone() == SamplingParams(top_p=0.5)
    assert SamplingParams(output_kind="delta").output_kind is RequestOutputKind.DELTA  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logits_processors": [len]}, "^logits_processors: .*use logit_bias"),
        ({"use_beam_search": True}, "^use_beam_search: .*beam_search"),
        ({"truncate_prompt_tokens": 5}, "^truncate_prompt_tokens"),
        ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "b"}}, "^guided_decoding: .*too"),
        ({"output_kind": "some"}, "^output_kind: must be CUMULATIVE"),
        ({"output_kind": True}, "^output_kind"),
        ({"max_token": 5}, r"^max_token: .*did you mean max_tokens\?"),
    ],
)
def test_sampling_fields_that_cannot_be_kept_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**values)
