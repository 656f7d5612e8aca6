"""The flags of `quire serve`, in the names vLLM's users know."""

from __future__ import annotations

import argparse

from quire.config.embedding import TASKS
from quire.config.server import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_EDGE_TIMEOUT,
    DEFAULT_LOAD_TIMEOUT,
    DEFAULT_MAX_RESTART_DELAY,
    DEFAULT_PORT,
    DEFAULT_PREFILL_TIMEOUT,
    DEFAULT_PREFILL_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    REASONING_PARSERS,
    TOOL_PARSERS,
)
from quire.serving.cli.arguments import (
    Commands,
    OneLineParser,
    add_debug,
    add_engine,
    add_generation_config,
    add_loading,
    add_lora,
    examples,
    json_object,
)

EXAMPLES = {
    "quire serve": "the default model on http://127.0.0.1:8000",
    "quire serve qwen3-0.6b --port 8080 --max-model-len 4096": "another model, port and length",
    "quire serve --admin --show-admin-key": "with the block map in the playground; prints its address and key",
    "quire serve --host 0.0.0.0 --api-key-file keys.txt": "reachable from elsewhere, for those with a key",
    "quire serve --enable-lora --lora-modules sql=/adapters/sql": "with a LoRA adapter, as the model `sql`",
    "quire serve --replicas 2": "two engines behind one address, with a router that knows their caches",
    "quire serve --api-workers 4 --limit queue_requests=4096": "four HTTP processes, a longer queue",
}


def add_serve(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP with the OpenAI API",
        description="Serve a model over HTTP with the OpenAI API, a playground and metrics.",
        **examples(EXAMPLES),
    )
    _add_address(parser)
    _add_replicas(parser.add_argument_group("replicas"))
    add_serve_flags(parser).add_argument(
        "--lora-dir",
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="the folder below which /v1/load_lora_adapter may load adapters, which needs an admin key: see --admin "
        "(none: it loads nothing)",
    )


def add_serve_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add every flag that describes a server, but for where it listens and what its operator may load while it runs.
    Returns the group of LoRA adapters."""
    parser.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="a path, a hub name or a catalogue name; default model when absent",
    )
    parser.add_argument("-m", "--model", help="the same as MODEL")
    parser.add_argument(
        "--served-model-name",
        action="append",
        nargs="+",
        metavar="NAME",
        help="what clients call the model; several names may follow, and it is repeatable",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="auto",
        help="what the model is for: generate text, embed, classify or score texts (auto: as its files say)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template instead of the model's own")
    parser.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help='values of the chat template\'s variables for requests that do not set them: {"enable_thinking": false}',
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="how the model writes calls of tools (auto: as its chat template does)",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="how the model marks its reasoning (auto: as its chat template does)",
    )
    add_debug(parser)
    _add_server(parser)
    _add_prefill(parser)
    _add_access(parser)
    _add_watching(parser)
    lora = add_lora(parser)
    group = add_generation_config(add_loading(add_engine(parser), verbose=False))
    group.add_argument("--scheduling-policy", default=argparse.SUPPRESS, help="the same as --policy")
    group.add_argument("--seed", type=int, help="for requests that bring no seed (0)")
    return lora


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="engines behind this address, each a whole server with its share of CPU threads and GPUs (1); requests go "
        "to the one that has their prompt cached",
    )


def _add_address(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("address")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need an API key")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port to listen on; 0 is any ({DEFAULT_PORT})")
    group.add_argument("--uds", metavar="PATH", help="listen on this UNIX socket instead of host and port")
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM); SIGHUP rereads")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its private key, where the certificate's file has none")
    group.add_argument("--root-path", default="", metavar="PATH", help="prefix of all paths behind a proxy, like /llm")
    group.add_argument("--no-playground", action="store_true", help="serve no page at /")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--api-workers", type=int, default=1, metavar="N", help="HTTP processes that share the port and the queue (1)"
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=DEFAULT_DRAIN_SECONDS,
        metavar="S",
        help=f"how long running requests may take to finish at the end ({DEFAULT_DRAIN_SECONDS:g})",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=DEFAULT_STEP_TIMEOUT,
        metavar="S",
        help=f"a step that takes longer counts as hung, and the engine is restarted; above your slowest step "
        f"({DEFAULT_STEP_TIMEOUT:g})",
    )
    _add_seconds(
        group,
        "--load-timeout",
        DEFAULT_LOAD_TIMEOUT,
        "a load without progress for this long counts as hung, and is started again",
    )
    _add_seconds(
        group, "--edge-timeout", DEFAULT_EDGE_TIMEOUT, "an HTTP process that is silent for this long is replaced"
    )
    _add_seconds(
        group,
        "--max-restart-delay",
        DEFAULT_MAX_RESTART_DELAY,
        "the longest pause between two restarts of a process that keeps ending",
    )
    group.add_argument(
        "--request-timeout", type=float, metavar="S", help="end a request with an error this long after its receipt"
    )
    group.add_argument(
        "--queue-timeout", type=float, metavar="S", help="end a request with 503 that waits longer for the engine"
    )
    _add_requests(group)


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a limit, like queue_requests=4096; repeatable; docs/reference/http_api.md lists them",
    )
    group.add_argument(
        "--strict", action="store_true", help="refuse request parameters without effect instead of warning"
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="end every stream with its usage, as if the request had set stream_options.include_usage",
    )
    group.add_argument(
        "--files-dir",
        metavar="DIR",
        help="keep uploaded files and batches in this folder, so that they survive a restart (default: they end with "
        "the server)",
    )


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefill / decode disaggregation")
    group.add_argument(
        "--prefill-url",
        action="append",
        default=[],
        metavar="URL",
        help="have this prefill server compute prompts first; needs --kv-role decode; repeatable: they take turns",
    )
    group.add_argument(
        "--prefill-min-tokens",
        type=int,
        default=DEFAULT_PREFILL_TOKENS,
        metavar="N",
        help=f"compute shorter prompts here ({DEFAULT_PREFILL_TOKENS})",
    )
    _add_seconds(group, "--prefill-timeout", DEFAULT_PREFILL_TIMEOUT, "compute a prompt here after so many seconds")


def _add_seconds(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar="S", help=f"{text} ({default:g})")


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask clients for it; repeatable")
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="one key per line, reread on SIGHUP; safer than --api-key, which `ps` shows",
    )
    group.add_argument(
        "--router-key-file",
        metavar="FILE",
        help="API keys of routers (quire route --replica-key-file), one per line: clients behind them stay apart",
    )
    group.add_argument(
        "--admin",
        action="store_true",
        help="serve /admin; a key is made and kept in a private file unless one is given",
    )
    group.add_argument("--admin-key", action="append", default=[], metavar="KEY", help="for /admin; repeatable")
    group.add_argument(
        "--admin-key-file", metavar="FILE", help="keys for /admin, one per line, reread on SIGHUP; or QUIRE_ADMIN_KEY"
    )
    group.add_argument("--show-admin-key", action="store_true", help="print the playground's address with an admin key")
    group.add_argument("--admin-port", type=int, metavar="PORT", help="serve /admin on this port only")
    group.add_argument("--admin-host", default="127.0.0.1", help="address of --admin-port (127.0.0.1)")
    group.add_argument("--admin-uds", metavar="PATH", help="serve /admin on this UNIX socket only")
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="web pages of it may call; repeatable"
    )
    group.add_argument("--open-metrics", action="store_true", help="/metrics asks for no key")
    group.add_argument(
        "--shared-prefix-cache", action="store_true", help="clients of all keys find each other's cached prompts"
    )


def _add_watching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and traces")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="(info; on a terminal warning)"
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="(text)")
    group.add_argument("--access-log", action="store_true", help="log every request: client, path, status, seconds")
    group.add_argument(
        "--metrics-names",
        choices=("quire", "vllm", "both"),
        default="quire",
        help="how /metrics calls what vLLM has too: quire:NAME, vllm:NAME for its dashboards, or both (quire)",
    )
    group.add_argument("--trace-endpoint", metavar="URL", help="send OpenTelemetry traces there, by OTLP over HTTP")
