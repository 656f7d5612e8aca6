"""`quire route`: a router in front of several servers."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quire.config.router import (
    DEFAULT_CACHE_TOKENS,
    DEFAULT_ROUTER_PORT,
    MAX_REPLICAS,
    BalanceConfig,
    RouterConfig,
    WaitConfig,
    read_replica,
)
from quire.serving.cli.arguments import Commands, OneLineParser, add_debug, examples
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.keys import KeySources

EXAMPLES = {
    "quire route --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002": (
        f"two servers behind http://127.0.0.1:{DEFAULT_ROUTER_PORT}"
    ),
    "quire route --replica a=http://10.0.0.1:8000 --replica b=http://10.0.0.2:8000 --admin-key-file admin.txt": (
        "named replicas, and /router/replicas for an admin to add, drain and remove replicas"
    ),
    "quire route --host 0.0.0.0 --replicas-check-keys --replica http://10.0.0.1:8000": (
        "reachable from other machines; the replicas check API keys"
    ),
}
_BALANCE, _WAITS = BalanceConfig(), WaitConfig()
_WAIT_FLAGS = {
    "connect_timeout": ("connect", "seconds that a replica may take to accept a connection"),
    "first_byte_timeout": ("head", "seconds that a replica may take to begin its response"),
    "idle_timeout": ("idle", "seconds that a response may pause"),
    "health_interval": ("health_interval", "seconds between two health checks of a replica"),
    "health_timeout": ("health", "seconds that a replica may take to answer a health check"),
    "drain_seconds": ("drain", "seconds that requests in flight may take to finish after SIGTERM"),
}


def add_route(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "route",
        help="route requests to several servers, each to one that probably has its prompt cached",
        description="Route requests to several OpenAI-compatible servers, each to one that probably has its prompt "
        "cached and is not overloaded. If a server fails before its first byte, another one gets the request.",
        **examples(EXAMPLES),
    )
    add_debug(parser)
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a server: http://HOST:PORT, https://HOST:PORT or unix:PATH, with an optional name; repeatable",
    )
    _add_address(parser)
    _add_balance(parser)
    group = parser.add_argument_group("timeouts, in seconds")
    for flag, (field, text) in _WAIT_FLAGS.items():
        default: float = getattr(_WAITS, field)
        group.add_argument(f"--{flag.replace('_', '-')}", type=float, default=default, metavar="S",
                           help=f"{text} ({default:g})")  # fmt: skip
    group = parser.add_argument_group("logs")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="least severe messages to log (info; on a terminal: warning)",
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="format of log lines (text)")


def _add_address(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("address and access")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; other addresses than the loopback need an API key (127.0.0.1)",
    )
    group.add_argument(
        "--port",
        type=int,
        default=DEFAULT_ROUTER_PORT,
        help=f"port to listen on; 0: any free port ({DEFAULT_ROUTER_PORT})",
    )
    group.add_argument("--uds", metavar="PATH", help="listen on this UNIX socket instead of --host and --port")
    group.add_argument(
        "--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate chain (PEM), which SIGHUP reads again"
    )
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="private key of --ssl-certfile, if that file does not contain it"
    )
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="an API key that clients must send; repeatable"
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="file of API keys, one per line; safer than --api-key, which `ps` shows"
    )
    group.add_argument(
        "--replicas-check-keys",
        action="store_true",
        help="let the replicas check API keys; the router forwards those of clients",
    )
    group.add_argument(
        "--replica-key-file", metavar="FILE", help="send replicas the API key in this file instead of the client's"
    )
    group.add_argument(
        "--admin-key", action="append", default=[], metavar="KEY", help="a key for /router/replicas; repeatable"
    )
    group.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="file of keys for /router/replicas, one per line; or set QUIRE_ADMIN_KEY",
    )
    group.add_argument("--open-metrics", action="store_true", help="serve /metrics without an API key")
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a limit, like body_bytes=16777216; docs/reference/http_api.md lists them; repeatable",
    )


def _add_balance(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("choice of the replica")
    factor, slack, guess = _BALANCE.load_factor, _BALANCE.load_slack, DEFAULT_CACHE_TOKENS
    table: tuple[tuple[str, type, float | None, str], ...] = (
        ("--cache-tokens", int, None, f"tokens in the prefix cache of one replica (as it reports, else {guess})"),
        (
            "--load-factor",
            float,
            factor,
            f"a replica is overloaded from N times the mean load plus --load-slack on ({factor:g})",
        ),
        ("--load-slack", float, slack, f"requests added to the limit of --load-factor ({slack:g})"),
        ("--max-attempts", int, 3, "most replicas to which one request is sent, one after the other (3)"),
    )
    for flag, kind, default, text in table:
        group.add_argument(flag, type=kind, default=default, metavar="N", help=text)


def run_route(args: argparse.Namespace) -> int:
    from quire.serving.cli.serve import check_installed, default_log_level

    check_installed()
    config, keys = router_config(args)
    import uvloop

    from quire.observability.logging import set_up_logging
    from quire.serving.process.listeners import bound_connections, open_listeners
    from quire.serving.router.server import Router, serve_until_signal

    set_up_logging(args.log_level or default_log_level(args.log_format), args.log_format, "router")
    started = time.monotonic()
    config = replace(config, limits=bound_connections(config.limits, files_each=2))
    with open_listeners(config) as listeners:

        def announce() -> None:
            names = ", ".join(one.name for one in config.replicas) or "no replicas yet"
            seconds = time.monotonic() - started
            print(f"Quire routes to {names} on {listeners.url} (ready in {seconds:.1f} s)", flush=True)

        async def serve() -> int:
            router = Router(config)
            hang_up = partial(router.reload, keys)
            return await serve_until_signal(router, listeners.api[0], on_ready=announce, on_hangup=hang_up)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve())


def router_config(args: argparse.Namespace) -> tuple[RouterConfig, KeySources]:
    """Return the router configuration of the flags, and the sources of its keys. Raises ConfigError."""
    from quire.config.environment import read_environment
    from quire.config.keys import KeySources, read_key_file
    from quire.config.server import AccessConfig, ListenConfig
    from quire.serving.cli.serve import check_host, check_range, read_limits, socket_path
    from quire.serving.process.tls import make_context

    environment = read_environment()
    keys = KeySources(
        api_keys=(*args.api_key, *filter(None, [environment.api_key])),
        api_key_file=args.api_key_file,
        admin_keys=(*args.admin_key, *filter(None, [environment.admin_key])),
        admin_key_file=args.admin_key_file,
    )
    digests = keys.digests()
    _check(args, has_keys=bool(digests.key_digests), has_admin=bool(digests.admin_digests))
    check_range("port", args.port, 0, 65_535)
    if args.uds is None:
        check_host("host", args.host, has_keys=bool(digests.key_digests) or args.replicas_check_keys)
    listen = ListenConfig(uds=socket_path("uds", args.uds), tls_cert=args.ssl_certfile, tls_key=args.ssl_keyfile)
    make_context(listen)  # raises ConfigError for invalid files
    replica_key = None
    if args.replica_key_file is not None:
        replica_key = read_key_file("replica_key_file", args.replica_key_file)[0]
    config = RouterConfig(
        replicas=tuple(read_replica(text) for text in args.replica),
        host=args.host,
        port=args.port,
        listen=listen,
        access=AccessConfig(**digests._asdict(), metrics_need_key=not args.open_metrics),
        checks_keys=not args.replicas_check_keys,
        replica_key=replica_key,
        balance=BalanceConfig(load_factor=args.load_factor, load_slack=args.load_slack, cache_tokens=args.cache_tokens),
        waits=WaitConfig(**{field: getattr(args, flag) for flag, (field, _) in _WAIT_FLAGS.items()}),
        limits=read_limits(args.limit),
        max_attempts=args.max_attempts,
    )
    return config, keys


def _check(args: argparse.Namespace, *, has_keys: bool, has_admin: bool) -> None:
    for flag in _WAIT_FLAGS:
        seconds: float = getattr(args, flag)
        if not 0 <= seconds < math.inf or (seconds == 0 and flag != "drain_seconds"):
            raise ConfigError(flag, f"must be above 0 s, got {seconds:g}", "give a number like 30")
    if not args.replica and not has_admin:
        reason = "is not given, and without an admin key none can be added later"
        raise ConfigError("replica", reason, "add --replica http://HOST:PORT")
    if not 1 <= args.max_attempts <= MAX_REPLICAS:
        raise ConfigError("max_attempts", f"must be in [1, {MAX_REPLICAS}], got {args.max_attempts}", "3 is usual")
    if not 1 <= args.load_factor < math.inf:
        raise ConfigError("load_factor", f"must be 1 or more, got {args.load_factor:g}", "1.25 is usual")
    if not 0 < args.load_slack < math.inf:
        raise ConfigError("load_slack", f"must be above 0, got {args.load_slack:g}", "4 is usual")
    if args.replicas_check_keys and has_keys:
        reason = "cannot be given together with API keys of the router (--api-key, --api-key-file, QUIRE_API_KEY)"
        raise ConfigError("replicas_check_keys", reason, "choose one")
    if args.replicas_check_keys and args.replica_key_file is not None:
        reason = "passes on the clients' keys, and replica_key_file replaces them"
        raise ConfigError("replicas_check_keys", reason, "choose one")
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise ConfigError("ssl_keyfile", "needs a certificate too", "add --ssl-certfile FILE")
    if args.ssl_certfile is not None and args.uds is not None:
        raise ConfigError("ssl_certfile", "is for TCP, and uds replaces it", "leave one out")
