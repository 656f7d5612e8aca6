"""The arguments of vLLM's LLM and EngineArgs that have another name in Quire, have no effect here, or are not
supported.

Scripts written for vLLM pass many arguments by habit. A neutral value, which requests nothing, is accepted. A value
that only tunes something that Quire does not have is accepted with a warning. A value that would change what is
computed is refused, and the error names an alternative.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from quire.config.arguments import EngineArguments
from quire.config.embedding import TASKS, Task
from quire.types.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from quire.serving.lora import LoRARequest

logger = logging.getLogger("quire")

OWN_ARGUMENTS = (
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "load_format",
    "verbose",
    "generation_config",
    "override_generation_config",
)
RENAMED = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
    "kv_offloading_size": "swap_space",  # both in GiB
    "distributed_executor_backend": "executor",
}
_DEFAULT_BY_NONE = ("seed", "block_size", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
REVISIONS = {"revision": "model", "tokenizer_revision": "tokenizer"}  # a revision is part of a hub name


@dataclass(frozen=True, slots=True)
class NoEffect:
    """An argument of vLLM that Quire does not use. `neutral` are the values that are accepted silently.

    Any other value is refused with `advice` as the fix, or, if the argument `only_tunes`, accepted with a warning.
    """

    neutral: tuple[object, ...] = (None,)
    advice: str = "leave it out"
    only_tunes: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether its value is a bool, so that a command line flag of this name takes no value."""
        given = [value for value in self.neutral if value is not None]
        return bool(given) and all(isinstance(value, bool) for value in given)

    def check(self, name: str, value: object) -> str | None:
        """Return a warning for a value without effect, or None for a neutral one. Raises ConfigError for a refused
        value."""
        if any(value is known or (type(value) is type(known) and value == known) for known in self.neutral):
            return None
        if self.only_tunes:
            return f"{name}={value!r} has no effect: {self.advice}"
        raise ConfigError(name, f"{value!r} is not supported", self.advice)


_ONE_ENGINE = "set it to 1 and start one server per replica"
_NO_CONTEXT = "Quire does not split sequences over ranks; set it to 1 and raise tensor_parallel_size"
_BY_RAY = 'for ranks on several machines, use executor="ray"'
_TEXT_ONLY = "Quire takes text and images, which it prepares by itself; leave it out"
_NO_LORA = "leave it out: LoRA adapters are for calls that generate text"
_BY_MODEL = "leave it out, or use --task embed, classify or score of `quire serve`"
OFF = (None, False)


def tuning(advice: str, *neutral: object) -> NoEffect:
    """Return a NoEffect for an argument that only tunes something that Quire does not have. None and `neutral` are
    accepted silently, other values with a warning."""
    return NoEffect((None, *neutral), advice, only_tunes=True)


NO_EFFECT: dict[str, NoEffect] = {
    # parallelism
    "data_parallel_size": NoEffect((None, 1), _ONE_ENGINE),
    "data_parallel_size_local": NoEffect((None, 1), _ONE_ENGINE),
    "data_parallel_rank": NoEffect((None, 0), _ONE_ENGINE),
    "decode_context_parallel_size": NoEffect((None, 1), _NO_CONTEXT),
    "prefill_context_parallel_size": NoEffect((None, 1), _NO_CONTEXT),
    "nnodes": NoEffect((None, 1), _BY_RAY),
    "node_rank": NoEffect((None, 0), _BY_RAY),
    "enable_eplb": NoEffect(OFF, "experts are not moved between ranks; leave it out"),
    "disable_custom_all_reduce": tuning("ranks reduce by NCCL or Gloo", False, True),
    "max_parallel_loading_workers": tuning("weights are read by all cores"),
    "ray_workers_use_nsight": NoEffect(OFF, "leave it out"),
    # the model and its files
    "trust_remote_code": tuning("no code from a model's files is ever run", False),
    "task": NoEffect((None, "auto", "generate"), _BY_MODEL),
    "runner": NoEffect((None, "auto", "generate"), _BY_MODEL),
    "convert": NoEffect((None, "auto", "none"), _BY_MODEL),
    "tokenizer_mode": NoEffect((None, "auto", "fast", "hf"), 'use "auto": tokenizer.json or the GGUF file is read'),
    "config_format": NoEffect((None, "auto", "hf"), 'use "auto": config.json or GGUF metadata is read'),
    "model_impl": NoEffect((None, "auto", "vllm"), "Quire has its own models; leave it out"),
    "code_revision": NoEffect((None,), "no code from a model's files is ever run; leave it out"),
    "hf_config_path": NoEffect((None,), "config.json is read from the model's folder; put it there"),
    "hf_overrides": NoEffect((None, {}), "change config.json in a copy of the model's folder"),
    "hf_token": NoEffect((None, False), "log in by `hf auth login`, or set HF_TOKEN in the environment"),
    "download_dir": NoEffect((None,), "set HF_HOME in the environment"),
    "ignore_patterns": tuning("only the files that are needed are fetched"),
    "model_loader_extra_config": NoEffect((None, {}), "leave it out"),
    "safetensors_load_strategy": tuning("weights are mapped, not copied", "lazy"),
    "pt_load_map_location": tuning("only safetensors and GGUF files are opened", "cpu"),
    "use_tqdm_on_load": tuning("use verbose", True, False),
    "rope_scaling": NoEffect((None, {}), "change config.json in a copy of the model's folder"),
    "rope_theta": NoEffect((None,), "change config.json in a copy of the model's folder"),
    "served_model_name": tuning("only a server has it: quire serve --served-model-name"),
    "additional_config": NoEffect((None, {}), "leave it out"),
    "worker_cls": NoEffect((None, "auto"), "leave it out"),
    "worker_extension_cls": NoEffect((None, ""), "leave it out"),
    "scheduler_cls": NoEffect((None,), "use policy"),
    "logits_processors": NoEffect((None, [], ()), "use logit_bias, bad_words or structured_outputs"),
    "enable_prompt_embeds": NoEffect(OFF, "prompts are text or token ids"),
    # the KV cache and the scheduler
    "cpu_offload_gb": NoEffect((None, 0, 0.0), "use a quantized model, or quantization='fp8'"),
    "kv_offloading_backend": tuning("use swap_space and disk_cache_path", "native"),
    "enable_chunked_prefill": NoEffect((None, True), "prompts are always computed in chunks; leave it out"),
    "max_num_partial_prefills": tuning("use max_num_batched_tokens", 1),
    "max_long_partial_prefills": tuning("use max_num_batched_tokens", 1),
    "long_prefill_token_threshold": tuning("use max_num_batched_tokens", 0),
    "num_lookahead_slots": tuning("use speculative_config", 0),
    "prefix_caching_hash_algo": tuning("the prefix cache compares tokens, not hashes", "sha256", "builtin"),
    "disable_sliding_window": NoEffect(OFF, "sliding windows are always applied; leave it out"),
    "disable_hybrid_kv_cache_manager": tuning("blocks that have left the sliding window are always freed", False),
    "disable_cascade_attn": tuning("shared prefixes are read once where that is faster", False),
    "calculate_kv_scales": NoEffect(
        OFF, "there is one scale per head and token, computed when the cache is written; leave it out"
    ),
    "kv_transfer_config": NoEffect((None,), "use kv_role and kv_transport"),
    "kv_events_config": NoEffect((None,), "leave it out"),
    "async_scheduling": tuning("steps always run ahead of the host where they can", True),
    "stream_interval": tuning("a request's own stream_interval decides", 1),
    # compiling and CUDA graphs
    "compilation_config": tuning("steps are captured as CUDA graphs; enforce_eager turns that off", {}, 0),
    "optimization_level": tuning("steps are captured as CUDA graphs; enforce_eager turns that off"),
    "cuda_graph_sizes": tuning("sizes are chosen by the load", []),
    "max_seq_len_to_capture": tuning("graphs hold sequences of any length", 8192),
    "disable_async_output_proc": tuning("leave it out", False),
    # answers
    "max_logprobs": tuning("up to 1000 are returned", 20),
    "logprobs_mode": NoEffect((None, "raw_logprobs"), "logprobs are of the model's own logits; leave it out"),
    "structured_outputs_config": tuning("grammars are compiled by llguidance", {}),
    "guided_decoding_backend": tuning("grammars are compiled by llguidance", "auto", "guidance"),
    "reasoning_parser": NoEffect((None, ""), "only a server has it: quire serve --reasoning-parser"),
    "pooler_config": NoEffect((None,), _BY_MODEL),
    "override_pooler_config": NoEffect((None,), _BY_MODEL),
    # LoRA, pictures and sound
    "fully_sharded_loras": NoEffect(OFF, "adapters are on one device, as the model is; leave it out"),
    "lora_dtype": NoEffect((None, "auto"), "adapters are computed in the dtype of the model; leave it out"),
    "default_mm_loras": NoEffect((None, {}), "name the adapter in each request"),
    "media_io_kwargs": NoEffect((None, {}), _TEXT_ONLY),
    "mm_processor_cache_gb": tuning(_TEXT_ONLY, 4, 0),
    "disable_mm_preprocessor_cache": tuning(_TEXT_ONLY, False),
    "skip_mm_profiling": tuning(_TEXT_ONLY, False),
    "enable_mm_embeds": NoEffect(OFF, _TEXT_ONLY),
    "allowed_media_domains": NoEffect((None, []), _TEXT_ONLY),
    # logs and metrics
    "disable_log_stats": tuning("use stats()", True, False),
    "disable_log_requests": tuning("requests are not logged", True, False),
    "enable_log_requests": tuning("requests are not logged", False),
    "aggregate_engine_logging": tuning("there is one engine", False),
    "otlp_traces_endpoint": NoEffect((None,), "only a server has it: quire serve --trace-endpoint"),
    "collect_detailed_traces": tuning("use stats()"),
    "show_hidden_metrics_for_version": tuning("no metric is hidden"),
    "kv_cache_metrics": tuning("use stats()", False),
}


_TASKS: dict[str, dict[object, Task]] = {  # by argument: the task that each value selects
    "task": {**{task: task for task in TASKS}, "embedding": "embed", None: "auto"},
    "runner": {None: "auto", "auto": "auto", "generate": "generate", "pooling": "pooling"},
    "convert": {None: "auto", "auto": "auto", "none": "auto", "embed": "embed", "classify": "classify"},
}


def take_task(given: Mapping[str, Any]) -> tuple[dict[str, Any], str, Task]:
    """Return the arguments of `LLM` that do not select the task, the name of the argument that selects it, and the
    task. Raises ConfigError for an unknown value, or if two arguments select different tasks."""
    name, task = "task", TASKS[0]
    for one, known in _TASKS.items():
        value = given.get(one)
        if not isinstance(value, str | None) or value not in known:
            raise ConfigError(
                one, f"{value!r:.80} is unknown", f"choose one of {', '.join(map(str, filter(None, known)))}"
            )
        found = known[value]
        if task in ("auto", "pooling") and found != "auto":
            name, task = one, task if found == "pooling" and task != "auto" else found
        elif found not in ("auto", "pooling", task) or (task == "generate" and found == "pooling"):
            raise ConfigError(one, f"is {value!r}, but {name} is {given.get(name)!r}", "give one of them")
    return {one: value for one, value in given.items() if one not in _TASKS}, name, task


def check_encoder(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of `LLM` that an encoder does not have."""
    for name, neutral in (("generation_config", (None, "auto")), ("override_generation_config", (None, {}))):
        if given.get(name) not in neutral:
            reason = "is for models that generate text, and this one is an encoder"
            raise ConfigError(name, reason, "leave it out")


class CallArguments(TypedDict, total=False):
    """Other arguments of vLLM's `generate` and `chat`. Only `lora_request` has an effect."""

    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    prompt_adapter_request: object
    tokenization_kwargs: object
    mm_processor_kwargs: object
    chat_template_content_format: object


_IN_CALLS: dict[str, NoEffect] = {
    "lora_request": NoEffect((None,), _NO_LORA),
    "prompt_adapter_request": NoEffect((None,), "leave it out"),
    "tokenization_kwargs": NoEffect((None, {}), "pass token ids of your own: get_tokenizer().encode()"),
    "mm_processor_kwargs": NoEffect((None, {}), "set it for all requests, when the model is loaded"),
    "chat_template_content_format": NoEffect((None, "auto", "string", "openai"), 'use "auto"'),
}


def check_call(others: Mapping[str, object]) -> None:
    """Raise InvalidRequest for an argument of `generate` or `chat` that is unknown or has an unsupported value."""
    for name, value in others.items():
        if name not in _IN_CALLS:
            raise InvalidRequest(name, "is not an argument of this call", f"other arguments are {', '.join(_IN_CALLS)}")
        try:
            _IN_CALLS[name].check(name, value)
        except ConfigError as error:
            raise InvalidRequest(name, error.reason, error.fix) from None


def translate_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under Quire's names, without those that have no effect.

    Raises ConfigError for an argument that is unknown or has an unsupported value.
    """
    known = {item.name for item in fields(EngineArguments)} | set(OWN_ARGUMENTS)
    own: dict[str, Any] = {}
    for name, value in given.items():
        if name in NO_EFFECT:
            warning = NO_EFFECT[name].check(name, value)
            if warning is not None:
                logger.warning("%s", warning)
        elif name in RENAMED:
            _put(own, given, name, RENAMED[name], value)
        elif name in REVISIONS:
            continue
        elif name not in known:
            raise _unknown(name, known)
        elif name in _DEFAULT_BY_NONE and value is None:  # vLLM: None means the default
            continue
        else:
            own[name] = str(value).removeprefix("torch.") if name == "dtype" else value
    for name, model in REVISIONS.items():
        if given.get(name) is not None and (model == "model" or given.get(model) is not None):
            own[model] = with_revision(own.get(model), name, given[name])
    return own


def with_revision(model: object, name: str, revision: object) -> str:
    """Return the hub name of a model at a revision. Raises ConfigError for a model that is not on the hub."""
    from quire.runtime.loading.resolve import hub_repository

    repository = None if model is None else hub_repository(str(model))
    if not isinstance(revision, str) or not revision.strip():
        raise ConfigError(name, f"must be a branch, a tag or a commit, got {revision!r}")
    if repository is None:
        raise ConfigError(name, f"is for a model on the hub, and {model!r} is none", "leave it out")
    if "@" in repository and not repository.endswith(f"@{revision}"):
        raise ConfigError(name, f"is {revision!r}, but the name says {repository!r}", "give one of them")
    if "@" in repository:
        return repository
    base, colon, file = repository.partition(":")
    return f"{base}@{revision}{colon}{file}"


def _put(own: dict[str, Any], given: Mapping[str, Any], name: str, target: str, value: object) -> None:
    if value is None:
        return
    if given.get(target) is not None:
        raise ConfigError(name, f"is another name of {target}, which is given too", "give one of them")
    own[target] = value


def _unknown(name: str, known: set[str]) -> ConfigError:
    names = sorted(known | NO_EFFECT.keys() | RENAMED.keys() | REVISIONS.keys())
    close = difflib.get_close_matches(name, sorted(known), n=1) or difflib.get_close_matches(name, names, n=1)
    fix = f"did you mean {close[0]}?" if close else f"known are: {', '.join(sorted(known))}"
    return ConfigError(name, "is not an argument of LLM", fix)
