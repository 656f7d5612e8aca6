"""The configuration of the server, in frozen sections. The command line makes it; every server process receives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.arguments import EngineArguments

DEFAULT_CONNECTIONS = 16_384  # of one edge: the limit `connections`
DEFAULT_PORT = 8000
DEFAULT_DRAIN_SECONDS = 30.0
DEFAULT_STEP_TIMEOUT = 10.0
DEFAULT_LOAD_TIMEOUT = 300.0
DEFAULT_EDGE_TIMEOUT = 10.0
DEFAULT_MAX_RESTART_DELAY = 30.0
DEFAULT_PREFILL_TOKENS = 256
DEFAULT_PREFILL_TIMEOUT = 60.0
MetricNames = Literal["quire", "vllm", "both"]
TOOL_PARSERS = (
    "auto", "hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder", "glm45", "glm47", "kimi_k2", "minimax_m2",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "seed_oss", "step3", "hy_v3", "minicpm5",
    "hunyuan_a13b", "minimax_m1", "cohere_command", "phi4_mini_json", "lfm2", "olmo3", "internlm", "longcat", "xlam",
    "granite_20b_fc", "granite", "gemma4", "functiongemma",
    "harmony",
)  # fmt: skip
OTHER_TOOL_PARSERS = {  # names of the same formats in other servers
    "cohere_command3": "cohere_command", "cohere_command4": "cohere_command", "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "ernie45": "hermes", "glm": "glm45",
    "gpt-oss": "harmony", "granite-20b-fc": "granite_20b_fc", "granite4": "hermes", "jamba": "hunyuan_a13b",
    "llama3": "llama3_json", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "mimo": "qwen3_coder",
    "minimax": "minimax_m1", "minimax-m2": "minimax_m2", "openai": "harmony", "poolside_v1": "glm45",
    "qwen": "hermes", "qwen25": "hermes", "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder",
}  # fmt: skip
REASONING_PARSERS = (
    "auto", "none", "deepseek_r1", "qwen3", "mistral", "granite", "seed_oss", "cohere_command", "ernie45",
    "hunyuan_a13b", "kimi_vl", "apertus", "gemma4", "harmony",
)  # fmt: skip
OTHER_REASONING_PARSERS = {
    "cohere_command3": "cohere_command", "cohere_command4": "cohere_command", "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "qwen3", "deepseek_v3": "qwen3", "deepseek_v4": "qwen3", "glm45": "qwen3", "gpt-oss": "harmony",
    "holo2": "qwen3", "kimi": "kimi_vl", "kimi_k2": "qwen3", "minimax": "qwen3", "minimax-m2": "qwen3",
    "minimax_m2": "deepseek_r1", "minimax_m2_append_think": "deepseek_r1", "nemotron_v3": "qwen3",
    "olmo3": "deepseek_r1", "openai_gptoss": "harmony", "poolside_v1": "qwen3", "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The model to serve, and its names. The supervisor replaces a hub name in `model` by a path."""

    model: str
    tokenizer: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    served_names: tuple[str, ...] = ()  # model names that clients may use; responses carry the first
    chat_template: str | None = None  # text of a template that replaces the model's; None: the model's
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # default template variables
    tool_call_parser: str = "auto"  # the format of tool calls; auto: by the chat template
    reasoning_parser: str = "auto"  # the format of reasoning; auto: by the chat template
    generation_config: str = "auto"  # default sampling parameters: auto (from the model's files), none, or a folder
    override_generation_config: dict[str, Any] = field(default_factory=dict)  # single values that replace those


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may use the server. Keys are stored as SHA-256 digests in hex. Without digests no key is required."""

    key_digests: tuple[str, ...] = ()
    router_digests: tuple[str, ...] = ()  # those of key_digests that are of routers, which name the client
    admin_digests: tuple[str, ...] = ()  # (): no admin routes
    cors_origins: tuple[str, ...] = ()
    playground: bool = True
    metrics_need_key: bool = True
    shares_cache: bool = False  # clients with different keys share the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where and how the server listens, besides `host` and `port`."""

    uds: str | None = None  # path of a UNIX socket, in place of host and port
    root_path: str = ""  # path prefix that a proxy adds, such as /llm
    tls_cert: str | None = None  # path of the certificate chain, PEM; None: plain HTTP
    tls_key: str | None = None  # path of the private key; None: it is in tls_cert
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None  # if this or admin_uds is set, /admin is served only there
    admin_uds: str | None = None

    @property
    def has_admin_listener(self) -> bool:
        return self.admin_port is not None or self.admin_uds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """Limits of a request's time, in seconds; None: no limit."""

    request: float | None = None  # from receipt to the last token
    queue: float | None = None  # from receipt until the request is submitted to the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The prefill servers that a decode server asks to compute prompts."""

    urls: tuple[str, ...]
    min_tokens: int = DEFAULT_PREFILL_TOKENS  # shorter prompts are computed by the decode server itself
    timeout: float = DEFAULT_PREFILL_TIMEOUT  # seconds after which the decode server computes the prompt itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The whole configuration of the server. `limits` overrides entries of the table of limits, by name."""

    source: ModelSource
    engine: EngineArguments
    access: AccessConfig = field(default_factory=AccessConfig)
    listen: ListenConfig = field(default_factory=ListenConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_workers: int = 1
    replicas: int = 1  # servers behind one address, each with its own engine
    strict: bool = False  # refuse request parameters without effect instead of warning
    force_include_usage: bool = False  # all streams end with usage, even if the request does not ask for it
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    step_timeout: float = DEFAULT_STEP_TIMEOUT  # seconds after which a step counts as hung
    load_timeout: float = DEFAULT_LOAD_TIMEOUT  # seconds without progress after which loading counts as hung
    edge_timeout: float = DEFAULT_EDGE_TIMEOUT  # seconds without an answer after which an edge counts as hung
    sleep_idle_seconds: float | None = None  # seconds without a request after which the engine sleeps; None: never
    max_restart_delay: float = DEFAULT_MAX_RESTART_DELAY  # the longest pause between two restarts of a process
    limits: dict[str, int] = field(default_factory=dict)
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    files_dir: str | None = None  # folder of uploaded files and batches; None: deleted when the server ends
    metrics_names: MetricNames = "quire"  # prefixes of /metrics: quire, vllm, or both
    access_log: bool = False  # log one line per answered request
    trace_endpoint: str | None = None  # URL of an OTLP collector; None: no traces
    prefill: PrefillConfig | None = None  # None: this server computes all prompts itself
