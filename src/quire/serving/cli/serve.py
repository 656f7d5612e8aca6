"""`quire serve`: flags -> one ServerConfig -> the supervisor."""

from __future__ import annotations

import argparse
import ipaddress
import math
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.environment import read_environment
from quire.config.server import AccessConfig, ModelSource, ServerConfig
from quire.serving.cli.arguments import engine_settings
from quire.serving.cli.keys import digests, read_key_file
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.install import install_extra

MAX_WORKERS = 256
MAX_TEMPLATE_BYTES = 2**20


def run_serve(args: argparse.Namespace) -> int:
    _check_installed()
    from quire.serving.process.supervisor import Supervisor

    config, admin_key = server_config(args)
    return Supervisor(config, admin_key=admin_key).run()


def server_config(args: argparse.Namespace) -> tuple[ServerConfig, str | None]:
    """The server the flags describe, and the admin key to show its user, if one was made. Raises ConfigError."""
    access, shown_key = _access(args)
    _check_host(args.host, has_keys=bool(access.key_digests))
    _check_range("port", args.port, 0, 65_535)
    _check_range("api_workers", args.api_workers, 1, MAX_WORKERS)
    for name in ("drain_seconds", "step_timeout"):
        value: float = getattr(args, name)
        if not math.isfinite(value) or value < 0 or (name == "step_timeout" and value == 0):
            raise ConfigError(name, f"must be a number of seconds above 0, got {value:g}")
    engine = EngineArguments(**engine_settings(args))
    read_arguments(engine)  # raises for what is impossible with every model, before one is loaded
    config = ServerConfig(
        source=_source(args),
        engine=engine,
        access=access,
        host=args.host,
        port=args.port,
        api_workers=args.api_workers,
        lenient=args.lenient,
        drain_seconds=args.drain_seconds,
        step_timeout=args.step_timeout,
        limits=_limits(args.limit),
        log_level=args.log_level,
        log_format=args.log_format,
        trace_endpoint=_trace_endpoint(args.trace_endpoint),
    )
    return config, shown_key


def _source(args: argparse.Namespace) -> ModelSource:
    from quire.runtime.loading.catalogue import DEFAULT
    from quire.runtime.loading.generation import check_generation_config

    if args.model is not None and args.model_name is not None and args.model != args.model_name:
        raise ConfigError("model", f"is given twice: {args.model_name} and {args.model}", "give it once")
    names = tuple(args.served_model_name or ())
    if any(not name.strip() for name in names):
        raise ConfigError("served_model_name", "is empty", "give a name or leave it out")
    check_generation_config(args.generation_config or "auto", args.override_generation_config)
    return ModelSource(
        model=args.model_name or args.model or DEFAULT,
        tokenizer=args.tokenizer,
        load_format=args.load_format,
        served_names=tuple(dict.fromkeys(names)),
        chat_template=None if args.chat_template is None else _read_template(args.chat_template),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        generation_config=args.generation_config or "auto",
        override_generation_config=args.override_generation_config or {},
    )


def _access(args: argparse.Namespace) -> tuple[AccessConfig, str | None]:
    environment = read_environment()
    keys = [*args.api_key, *(read_key_file(args.api_key_file) if args.api_key_file is not None else ())]
    key_digests = digests("api_key", keys)
    if environment.api_key is not None:
        key_digests = tuple(dict.fromkeys((*key_digests, *digests("QUIRE_API_KEY", [environment.api_key]))))
    made = secrets.token_urlsafe(24) if args.admin and not args.admin_key else None
    admin_digests = digests("admin_key", [*args.admin_key, *([made] if made is not None else [])])
    if set(admin_digests) & set(key_digests):
        raise ConfigError("admin_key", "is also an API key", "choose another, so that API clients are no admins")
    access = AccessConfig(
        key_digests=key_digests,
        admin_digests=admin_digests,
        cors_origins=tuple(_origin(origin) for origin in args.cors_origin),
        playground=not args.no_playground,
        metrics_need_key=not args.open_metrics,
        shares_cache=args.shared_prefix_cache,
    )
    return access, made


def _origin(text: str) -> str:
    """A web origin: scheme, host and maybe port, or * for any."""
    parts = urlsplit(text)
    if text != "*" and (
        parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != text
    ):
        raise ConfigError("cors_origin", f"{text!r} is no origin", "write it like https://example.org")
    return text


def _check_host(host: str, *, has_keys: bool) -> None:
    if host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not has_keys:
        reason = f"{host} can be reached from other machines, and no API key is asked for"
        raise ConfigError("host", reason, "add --api-key-file FILE or set QUIRE_API_KEY, or use 127.0.0.1")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(name, f"must be in [{low}, {high}], got {value}", "choose a value inside it")


def _limits(given: list[str]) -> dict[str, int]:
    from quire.serving.http.limits import Limits

    changes: dict[str, int] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not value.isascii() or not value.isdigit() or len(value) > 18:
            raise ConfigError("limit", f"{item!r} is not NAME=VALUE with a whole number", "like --limit n=16")
        changes[name.strip()] = int(value)
    Limits(changes)  # raises for a name or value that is none
    return changes


def _read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("chat_template", f"{path} cannot be read: {error}", "give a text file") from None
    if not text.strip() or len(text) > MAX_TEMPLATE_BYTES:
        raise ConfigError("chat_template", f"{path} is empty or above {MAX_TEMPLATE_BYTES:,} characters", "shorten it")
    from quire.serving.text.chat_template import ChatTemplate

    try:
        ChatTemplate(text)
    except ModelLoadError as error:
        raise ConfigError("chat_template", f"{path} does not work: {error}") from None
    return text


def _trace_endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError("trace_endpoint", f"{url!r} is no URL", "like http://127.0.0.1:4318/v1/traces")
    from quire.observability.tracing import check_installed

    check_installed()
    return url


def _check_installed() -> None:
    """Raise ConfigError, naming the fix, if a package of the `server` extra is missing."""
    from importlib.util import find_spec

    needed = ("fastapi", "uvicorn", "uvloop", "httptools", "msgspec", "zmq", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError("serve", f"needs {', '.join(missing)}", install_extra("server"))
