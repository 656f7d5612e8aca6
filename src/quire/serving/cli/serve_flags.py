"""The flags of `quire serve`, with vLLM's names."""

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
    OTHER_REASONING_PARSERS,
    OTHER_TOOL_PARSERS,
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
    "quire serve qwen3-0.6b --port 8080 --max-model-len 4096": "another model, port and maximum length",
    "quire serve --admin --show-admin-key": "with the block map in the playground; prints its address and admin key",
    "quire serve --host 0.0.0.0 --api-key-file keys.txt": "reachable from other machines, with an API key",
    "quire serve --enable-lora --lora-modules sql=/adapters/sql": "with a LoRA adapter, which clients call `sql`",
    "quire serve --replicas 2": "two engines behind one address, with a router that uses their prefix caches",
    "quire serve --api-workers 4 --limit queue_requests=4096": "four HTTP processes and a longer queue",
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
    parser.add_argument(
        "--weights-dir",
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="the folder below which /update_weights_from_disk may load weights; needs an admin key, see --admin "
        "(none: only the model's own files)",
    )
    parser.add_argument(
        "--sleep-idle-seconds",
        type=float,
        metavar="S",
        help="let the engine sleep after this many seconds without a request; the next request wakes it up (never)",
    )
    add_serve_flags(parser).add_argument(
        "--lora-dir",
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="the folder below which /v1/load_lora_adapter may load LoRA adapters; needs an admin key, see --admin "
        "(none: clients cannot load adapters)",
    )


def add_serve_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add all flags that describe a server, except those that only `quire serve` has. Returns the LoRA flags."""
    parser.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="the model: a path, a hub name or a catalogue name (the default model)",
    )
    parser.add_argument("-m", "--model", help="the same as MODEL")
    parser.add_argument(
        "--served-model-name",
        action="append",
        nargs="+",
        metavar="NAME",
        help="names of the model for clients, one or several; repeatable (the model's own name)",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="auto",
        help="what to do with the model: generate text, embed, classify or score texts (auto: read from its files)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="file with a Jinja chat template (the model's own)")
    parser.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help='default values of chat template variables, as JSON: {"enable_thinking": false}',
    )
    parser.add_argument(
        "--tool-call-parser",
        type=lambda name: OTHER_TOOL_PARSERS.get(name, name),
        choices=TOOL_PARSERS,
        default="auto",
        help="format in which the model writes tool calls (auto: derived from its chat template)",
    )
    parser.add_argument(
        "--reasoning-parser",
        type=lambda name: OTHER_REASONING_PARSERS.get(name, name),
        choices=REASONING_PARSERS,
        default="auto",
        help="format in which the model marks its reasoning (auto: derived from its chat template)",
    )
    add_debug(parser)
    _add_server(parser)
    _add_prefill(parser)
    _add_access(parser)
    _add_watching(parser)
    lora = add_lora(parser)
    group = add_generation_config(add_loading(add_engine(parser), verbose=False))
    group.add_argument("--scheduling-policy", default=argparse.SUPPRESS, help="the same as --policy")
    group.add_argument("--seed", type=int, help="seed of requests that have none (0)")
    return lora


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of engines behind this address, each a whole server with a share of the CPU threads and GPUs; "
        "requests are routed to one that has their prompt cached (1)",
    )


def _add_address(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("address")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; other addresses than the loopback need an API key (127.0.0.1)",
    )
    group.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port to listen on; 0: any free port ({DEFAULT_PORT})"
    )
    group.add_argument("--uds", metavar="PATH", help="listen on this UNIX socket instead of --host and --port")
    group.add_argument(
        "--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate chain (PEM), which SIGHUP reads again"
    )
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="private key of --ssl-certfile, if that file does not contain it"
    )
    group.add_argument(
        "--root-path", default="", metavar="PATH", help="path prefix of the server behind a proxy, like /llm"
    )
    group.add_argument("--no-playground", action="store_true", help="do not serve the playground at /")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--api-workers",
        type=int,
        default=1,
        metavar="N",
        help="number of HTTP processes that share the port and the limits of the queue (1)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=DEFAULT_DRAIN_SECONDS,
        metavar="S",
        help=f"seconds that running requests may take to finish after SIGTERM ({DEFAULT_DRAIN_SECONDS:g})",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=DEFAULT_STEP_TIMEOUT,
        metavar="S",
        help=f"seconds after which a step counts as hung and the engine is restarted; must be above your slowest step "
        f"({DEFAULT_STEP_TIMEOUT:g})",
    )
    _add_seconds(
        group,
        "--load-timeout",
        DEFAULT_LOAD_TIMEOUT,
        "seconds without progress after which loading the model counts as hung and is started again",
    )
    _add_seconds(
        group,
        "--edge-timeout",
        DEFAULT_EDGE_TIMEOUT,
        "seconds after which an HTTP process that does not answer is replaced",
    )
    _add_seconds(
        group,
        "--max-restart-delay",
        DEFAULT_MAX_RESTART_DELAY,
        "longest delay in seconds between two restarts of a process that keeps ending",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="S",
        help="seconds after its receipt at which a request ends with 504 (none)",
    )
    group.add_argument(
        "--queue-timeout",
        type=float,
        metavar="S",
        help="seconds that a request may wait for the engine before it ends with 503 (none)",
    )
    _add_requests(group)


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a limit, like queue_requests=4096; docs/reference/http_api.md lists them; repeatable",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="refuse requests with parameters that have no effect, instead of a warning",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="end every stream with its token usage, as if the request had set stream_options.include_usage",
    )
    group.add_argument(
        "--files-dir",
        metavar="DIR",
        help="keep uploaded files and batches in this folder, so that they survive a restart (none: they end with the "
        "server)",
    )


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefill / decode disaggregation")
    group.add_argument(
        "--prefill-url",
        action="append",
        default=[],
        metavar="URL",
        help="URL of a prefill server that computes prompts for this one; needs --kv-role decode; repeatable",
    )
    group.add_argument(
        "--prefill-min-tokens",
        type=int,
        default=DEFAULT_PREFILL_TOKENS,
        metavar="N",
        help=f"fewest prompt tokens for --prefill-url; shorter prompts are computed here ({DEFAULT_PREFILL_TOKENS})",
    )
    _add_seconds(
        group,
        "--prefill-timeout",
        DEFAULT_PREFILL_TIMEOUT,
        "seconds to wait for --prefill-url before a prompt is computed here",
    )


def _add_seconds(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar="S", help=f"{text} ({default:g})")


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="an API key that clients must send; repeatable"
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file of API keys, one per line, which SIGHUP reads again; safer than --api-key, which `ps` shows",
    )
    group.add_argument(
        "--router-key-file",
        metavar="FILE",
        help="file of API keys of routers (quire route --replica-key-file), one per line; their clients stay separate",
    )
    group.add_argument(
        "--admin",
        action="store_true",
        help="serve /admin; unless an admin key is given, one is generated and written to a private file",
    )
    group.add_argument("--admin-key", action="append", default=[], metavar="KEY", help="a key for /admin; repeatable")
    group.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="file of keys for /admin, one per line, which SIGHUP reads again; or set QUIRE_ADMIN_KEY",
    )
    group.add_argument(
        "--show-admin-key", action="store_true", help="print the address of the playground with an admin key in it"
    )
    group.add_argument("--admin-port", type=int, metavar="PORT", help="serve /admin on this port only")
    group.add_argument("--admin-host", default="127.0.0.1", help="address to listen on with --admin-port (127.0.0.1)")
    group.add_argument("--admin-uds", metavar="PATH", help="serve /admin on this UNIX socket only")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may call the server (CORS); repeatable",
    )
    group.add_argument("--open-metrics", action="store_true", help="serve /metrics without an API key")
    group.add_argument(
        "--shared-prefix-cache",
        action="store_true",
        help="share the prefix cache between clients with different API keys",
    )


def _add_watching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and traces")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="least severe messages to log (info; on a terminal: warning)",
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="format of log lines (text)")
    group.add_argument(
        "--access-log", action="store_true", help="log every request with its client, path, status and seconds"
    )
    group.add_argument(
        "--metrics-names",
        choices=("quire", "vllm", "both"),
        default="quire",
        help="names of metrics that vLLM has too: quire:NAME, vllm:NAME for its dashboards, or both (quire)",
    )
    group.add_argument(
        "--trace-endpoint", metavar="URL", help="URL to which OpenTelemetry traces are sent, by OTLP over HTTP (none)"
    )
