"""Quire: a language-model inference engine with a paged KV cache and continuous batching."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.serving.async_llm import AsyncEngineArgs as AsyncEngineArgs
    from quire.serving.async_llm import AsyncLLM as AsyncLLM
    from quire.serving.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.serving.async_llm import EngineArgs as EngineArgs
    from quire.serving.batch import LiveRequest as LiveRequest
    from quire.serving.llm import LLM as LLM
    from quire.serving.lora import LoRARequest as LoRARequest
    from quire.serving.requests import TextPrompt as TextPrompt
    from quire.serving.requests import TokensPrompt as TokensPrompt
    from quire.types.beam import BeamSearchOutput as BeamSearchOutput
    from quire.types.beam import BeamSearchParams as BeamSearchParams
    from quire.types.beam import BeamSearchSequence as BeamSearchSequence
    from quire.types.decoding import StructuredOutputsParams as StructuredOutputsParams
    from quire.types.errors import ConfigError as ConfigError
    from quire.types.errors import DoesNotFit as DoesNotFit
    from quire.types.errors import EngineDead as EngineDead
    from quire.types.errors import InvalidRequest as InvalidRequest
    from quire.types.errors import ModelLoadError as ModelLoadError
    from quire.types.errors import QuireError as QuireError
    from quire.types.output import CompletionOutput as CompletionOutput
    from quire.types.output import Logprob as Logprob
    from quire.types.output import RequestOutput as RequestOutput
    from quire.types.pooling import ClassificationOutput as ClassificationOutput
    from quire.types.pooling import EmbeddingOutput as EmbeddingOutput
    from quire.types.pooling import PoolingOutput as PoolingOutput
    from quire.types.pooling import PoolingParams as PoolingParams
    from quire.types.pooling import ScoreOutput as ScoreOutput
    from quire.types.prefix import PinnedPrefix as PinnedPrefix
    from quire.types.sampling import SamplingParams as SamplingParams
    from quire.types.stats import EngineStats as EngineStats
    from quire.types.vllm_sampling import RequestOutputKind as RequestOutputKind

__version__ = "0.1.0"

_HOMES = {
    "LLM": "quire.serving.llm",
    "AsyncLLM": "quire.serving.async_llm",
    "AsyncLLMEngine": "quire.serving.async_llm",
    "EngineArgs": "quire.serving.async_llm",
    "AsyncEngineArgs": "quire.serving.async_llm",
    "LoRARequest": "quire.serving.lora",
    "TextPrompt": "quire.serving.requests",
    "TokensPrompt": "quire.serving.requests",
    "RequestOutputKind": "quire.types.vllm_sampling",
    "LiveRequest": "quire.serving.batch",
    "SamplingParams": "quire.types.sampling",
    "BeamSearchParams": "quire.types.beam",
    "BeamSearchOutput": "quire.types.beam",
    "BeamSearchSequence": "quire.types.beam",
    "StructuredOutputsParams": "quire.types.decoding",
    "RequestOutput": "quire.types.output",
    "EmbeddingOutput": "quire.types.pooling",
    "ClassificationOutput": "quire.types.pooling",
    "ScoreOutput": "quire.types.pooling",
    "PoolingOutput": "quire.types.pooling",
    "PoolingParams": "quire.types.pooling",
    "CompletionOutput": "quire.types.output",
    "Logprob": "quire.types.output",
    "PinnedPrefix": "quire.types.prefix",
    "EngineStats": "quire.types.stats",
    "QuireError": "quire.types.errors",
    "InvalidRequest": "quire.types.errors",
    "ConfigError": "quire.types.errors",
    "DoesNotFit": "quire.types.errors",
    "ModelLoadError": "quire.types.errors",
    "EngineDead": "quire.types.errors",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "DoesNotFit",
    "EmbeddingOutput",
    "EngineArgs",
    "EngineDead",
    "EngineStats",
    "InvalidRequest",
    "LiveRequest",
    "LoRARequest",
    "Logprob",
    "ModelLoadError",
    "PinnedPrefix",
    "PoolingOutput",
    "PoolingParams",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import quire` costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
