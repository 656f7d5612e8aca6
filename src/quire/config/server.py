"""How the server runs: frozen sections, made once by the command line and handed to every process it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.config.arguments import EngineArguments

DEFAULT_PORT = 8000
DEFAULT_DRAIN_SECONDS = 30.0
DEFAULT_STEP_TIMEOUT = 30.0
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", "deepseek_r1", "qwen3", "mistral")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What to serve and under which names. `model` is a path after it was resolved once by the supervisor."""

    model: str
    tokenizer: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    served_names: tuple[str, ...] = ()  # the first is the one answers carry
    chat_template: str | None = None  # the template's text, from the operator; None: the model's own
    tool_call_parser: str = "auto"  # how calls of tools are written; auto: as the chat template writes them
    reasoning_parser: str = "auto"  # how reasoning is marked; auto: as the chat template marks it


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may come in. Keys are held as SHA-256 digests (hex); none means no key is asked for."""

    key_digests: tuple[str, ...] = ()
    admin_digests: tuple[str, ...] = ()  # none: there are no admin routes
    cors_origins: tuple[str, ...] = ()
    playground: bool = True
    metrics_need_key: bool = True
    shares_cache: bool = False  # cached prompts are found by clients of every key


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The whole server. `limits` overrides entries of the limits table by name."""

    source: ModelSource
    engine: EngineArguments
    access: AccessConfig = field(default_factory=AccessConfig)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_workers: int = 1
    lenient: bool = False  # unknown and unsupported parameters become warnings in the answer
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    step_timeout: float = DEFAULT_STEP_TIMEOUT  # a step that takes longer counts as hung
    limits: dict[str, int] = field(default_factory=dict)
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    trace_endpoint: str | None = None  # OTLP; None: no traces
