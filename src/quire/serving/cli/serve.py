"""`quire serve`: turns the flags into one ServerConfig and runs the supervisor."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.environment import ADMIN_KEY, API_KEY, read_environment
from quire.config.keys import KeySources, digests, read_key_file
from quire.config.server import AccessConfig, ListenConfig, ModelSource, PrefillConfig, ServerConfig, TimeoutConfig
from quire.config.server_url import split_server_url
from quire.serving.cli.arguments import engine_settings
from quire.serving.process.spawning import Spawned
from quire.serving.process.tls import make_context
from quire.types.errors import ConfigError, InvalidRequest, ModelLoadError
from quire.types.install import install_extra

MAX_WORKERS = 256
MAX_SERVED_REPLICAS = 64
_SECONDS = ("drain_seconds", "max_restart_delay", "step_timeout", "load_timeout", "edge_timeout", "request_timeout",
            "queue_timeout", "prefill_timeout", "sleep_idle_seconds")  # fmt: skip
MAX_TEMPLATE_BYTES = 2**20
MAX_SOCKET_PATH = 100  # bytes; the system's limit is 107
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


def run_serve(args: argparse.Namespace, engine: Spawned | None = None) -> int:
    """Run the server. `engine` is the engine process if it was started already. Returns the exit code."""
    check_installed()
    from quire.serving.process.supervisor import Supervisor

    config, keys = server_config(args)
    if config.replicas > 1:
        from quire.serving.router.replicated import ReplicatedServer

        if engine is not None:
            engine.process.kill()  # each replica starts its own
        return ReplicatedServer(config, keys=keys, admin_key=_shown_key(args, keys)).run()
    return Supervisor(config, keys=keys, admin_key=_shown_key(args, keys), engine=engine).run()


def server_config(args: argparse.Namespace) -> tuple[ServerConfig, KeySources]:
    """Return the server configuration of the flags, and the sources of its keys. Raises ConfigError."""
    keys = _keys(args)
    access = _access(args, keys)
    if args.uds is None:
        check_host("host", args.host, has_keys=bool(access.key_digests))
    check_range("port", args.port, 0, 65_535)
    check_range("api_workers", args.api_workers, 1, MAX_WORKERS)
    replicas: int = getattr(args, "replicas", 1)  # only `serve` has the flag
    check_range("replicas", replicas, 1, MAX_SERVED_REPLICAS)
    for name in _SECONDS:
        value: float | None = getattr(args, name, None)  # some flags are only those of `serve`
        may_be_0 = name in ("drain_seconds", "max_restart_delay")
        if value is not None and (not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0)):
            least = "0 or more" if may_be_0 else "above 0"
            raise ConfigError(name, f"must be {least}, in seconds, got {value:g}", "give a number like 30")
    engine = EngineArguments(**engine_settings(args))
    read_arguments(engine)  # raises for settings that are invalid for every model
    naps: float | None = getattr(args, "sleep_idle_seconds", None)
    if naps is not None and engine.record is not None:
        raise ConfigError("sleep_idle_seconds", "cannot be given together with record", "leave one of them out")
    config = ServerConfig(
        source=_source(args),
        engine=engine,
        access=access,
        listen=_listen(args, access),
        timeouts=TimeoutConfig(request=args.request_timeout, queue=args.queue_timeout),
        host=args.host,
        port=args.port,
        api_workers=args.api_workers,
        replicas=replicas,
        strict=args.strict,
        force_include_usage=args.enable_force_include_usage,
        drain_seconds=args.drain_seconds,
        step_timeout=args.step_timeout,
        load_timeout=args.load_timeout,
        edge_timeout=args.edge_timeout,
        max_restart_delay=args.max_restart_delay,
        sleep_idle_seconds=naps,
        limits=read_limits(args.limit),
        files_dir=_files_dir(args.files_dir),
        metrics_names=args.metrics_names,
        log_level=args.log_level or default_log_level(args.log_format),
        log_format=args.log_format,
        access_log=args.access_log,
        trace_endpoint=_trace_endpoint(args.trace_endpoint),
        prefill=_prefill(args, engine),
    )
    return config, keys


def _source(args: argparse.Namespace) -> ModelSource:
    from quire.runtime.loading.catalogue import DEFAULT
    from quire.runtime.loading.generation import check_generation_config

    if args.model is not None and args.model_name is not None and args.model != args.model_name:
        raise ConfigError("model", f"is given twice: {args.model_name} and {args.model}", "give it once")
    given = args.served_model_name or ()
    names = [name for several in given for name in several]
    model = args.model_name or args.model
    if model is None and given and len(given[-1]) > 1:  # `--served-model-name NAME MODEL`
        model = names.pop()
    if any(not name.strip() for name in names):
        raise ConfigError("served_model_name", "is empty", "give a name or leave it out")
    check_generation_config(args.generation_config or "auto", args.override_generation_config)
    return ModelSource(
        model=model or DEFAULT,
        tokenizer=args.tokenizer,
        load_format=args.load_format,
        served_names=tuple(dict.fromkeys(names)),
        chat_template=None if args.chat_template is None else _read_template(args.chat_template),
        chat_template_kwargs=_template_kwargs(args.default_chat_template_kwargs or {}),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        generation_config=args.generation_config or "auto",
        override_generation_config=args.override_generation_config or {},
    )


def _template_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    """Check the default variables of the chat template. Whether the template reads them is checked when the model is
    loaded."""
    if not values:
        return {}
    from quire.serving.http.limits import Limits
    from quire.serving.http.validators.prompts import TemplateVariables

    try:
        return TemplateVariables().check("default_chat_template_kwargs", values, Limits())
    except InvalidRequest as error:
        raise ConfigError(error.field, error.reason, error.fix) from None


def _keys(args: argparse.Namespace) -> KeySources:
    environment = read_environment()
    in_environment = {API_KEY: environment.api_key, ADMIN_KEY: environment.admin_key}
    for name, key in in_environment.items():
        digests(name, () if key is None else (key,))  # raises ConfigError that names the variable
    api = (*args.api_key, *filter(None, [environment.api_key]))
    admin = (*args.admin_key, *filter(None, [environment.admin_key]))
    made = secrets.token_urlsafe(24) if args.admin and not admin and args.admin_key_file is None else None
    return KeySources(
        api_keys=api,
        api_key_file=args.api_key_file,
        admin_keys=(*admin, *filter(None, [made])),
        admin_key_file=args.admin_key_file,
        router_key_file=args.router_key_file,
        made_admin_key=made,
    )


def _shown_key(args: argparse.Namespace, keys: KeySources) -> str | None:
    """Return the admin key to print, or None without --show-admin-key. Raises ConfigError if there is no admin key."""
    if not args.show_admin_key:
        return None
    if keys.admin_keys:
        return keys.admin_keys[0]
    if keys.admin_key_file is not None:
        return read_key_file("admin_key_file", keys.admin_key_file)[0]
    raise ConfigError("show_admin_key", "there is no admin key", "add --admin")


def _access(args: argparse.Namespace, keys: KeySources) -> AccessConfig:
    return AccessConfig(
        **keys.digests()._asdict(),
        cors_origins=tuple(_origin(origin) for origin in args.cors_origin),
        playground=not args.no_playground,
        metrics_need_key=not args.open_metrics,
        shares_cache=args.shared_prefix_cache,
    )


def _listen(args: argparse.Namespace, access: AccessConfig) -> ListenConfig:
    if (args.admin_port is not None or args.admin_uds is not None) and not access.admin_digests:
        name = "admin_port" if args.admin_port is not None else "admin_uds"
        raise ConfigError(name, "there is no admin key", "add --admin or --admin-key-file FILE")
    if args.admin_port is not None:
        if args.admin_uds is not None:
            raise ConfigError("admin_uds", "cannot be given together with admin_port", "choose one")
        check_range("admin_port", args.admin_port, 0, 65_535)
        check_host("admin_host", args.admin_host, has_keys=bool(access.key_digests))
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise ConfigError("ssl_keyfile", "needs a certificate too", "add --ssl-certfile FILE")
    if args.ssl_certfile is not None and args.uds is not None:
        raise ConfigError("ssl_certfile", "is for TCP, and uds replaces it", "leave one out")
    listen = ListenConfig(
        uds=socket_path("uds", args.uds),
        root_path=_root_path(args.root_path),
        tls_cert=args.ssl_certfile,
        tls_key=args.ssl_keyfile,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        admin_uds=socket_path("admin_uds", args.admin_uds),
    )
    if listen.uds is not None and listen.uds == listen.admin_uds:
        raise ConfigError("admin_uds", "is the same path as uds", "choose another")
    make_context(listen)  # raises ConfigError for invalid files
    return listen


def socket_path(setting: str, path: str | None) -> str | None:
    if path is None:
        return None
    found = str(Path(path).absolute())
    if not path or len(found.encode()) > MAX_SOCKET_PATH:
        reason = f"must be a path of 1 to {MAX_SOCKET_PATH} bytes, is {found!r}"
        raise ConfigError(setting, reason, "choose a shorter one")
    return found


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and (not _ROOT_PATH.fullmatch(path) or "/../" in f"{path}/" or "/./" in f"{path}/"):
        raise ConfigError("root_path", f"{text!r} is not a path", "write it like /llm")
    return path


def _origin(text: str) -> str:
    """Check a web origin: scheme, host and optional port, or * for any. Raises ConfigError."""
    try:
        parts = urlsplit(text)
        is_origin = parts.scheme in ("http", "https") and bool(parts.netloc)
        is_origin = is_origin and f"{parts.scheme}://{parts.netloc}" == text
    except ValueError:
        is_origin = False
    if text != "*" and not is_origin:
        raise ConfigError("cors_origin", f"{text!r} is not an origin", "write it like https://example.org")
    return text


def check_host(setting: str, host: str, *, has_keys: bool) -> None:
    if host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not has_keys:
        reason = f"{host} can be reached from other machines, and no API key is asked for"
        raise ConfigError(setting, reason, "add --api-key-file FILE or set QUIRE_API_KEY, or use 127.0.0.1")


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(name, f"must be in [{low}, {high}], got {value}", "choose a value inside it")


def read_limits(given: list[str]) -> dict[str, int]:
    from quire.serving.http.limits import Limits

    changes: dict[str, int] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not value.isascii() or not value.isdigit() or len(value) > 18:
            raise ConfigError("limit", f"{item!r} is not NAME=VALUE with a whole number", "like --limit n=16")
        changes[name.strip()] = int(value)
    Limits(changes)  # raises for an unknown name or invalid value
    return changes


def _files_dir(path: str | None) -> str | None:
    """Return the absolute path of the folder for uploaded files, and create it if necessary. Raises ConfigError if it
    cannot be written."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "files").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError("files_dir", f"{folder} cannot be used: {error.strerror}", "choose another folder") from None
    if not os.access(folder / "files", os.W_OK):
        raise ConfigError("files_dir", f"{folder} cannot be written", "choose another folder")
    return str(folder)


def _read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
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
    try:
        is_url = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).netloc)
    except ValueError:  # such as an IPv6 address without its second bracket
        is_url = False
    if not is_url:
        raise ConfigError("trace_endpoint", f"{url!r} is not a URL", "like http://127.0.0.1:4318/v1/traces")
    from quire.observability.tracing import check_installed

    check_installed()
    return url


def _prefill(args: argparse.Namespace, engine: EngineArguments) -> PrefillConfig | None:
    if not args.prefill_url:
        return None
    if engine.kv_role not in ("decode", "both"):
        reason = f"needs a server that gets blocks from others, and kv_role is {engine.kv_role!r}"
        raise ConfigError("prefill_url", reason, "add --kv-role decode and --kv-transport")
    for url in args.prefill_url:
        try:
            split_server_url(url)
        except ValueError:
            reason = f"{url[:200]!r} is not the URL of a server"
            raise ConfigError("prefill_url", reason, "like http://127.0.0.1:8001") from None
    check_range("prefill_min_tokens", args.prefill_min_tokens, 1, 2**31)
    return PrefillConfig(urls=tuple(args.prefill_url), min_tokens=args.prefill_min_tokens, timeout=args.prefill_timeout)


def default_log_level(log_format: str) -> str:
    """Return "warning" for text logs on a terminal, where the supervisor prints progress and the address, otherwise
    "info"."""
    return "warning" if log_format == "text" and sys.stderr.isatty() else "info"


def check_installed() -> None:
    """Raise ConfigError that names the fix if a package of the `server` extra is missing."""
    from importlib.util import find_spec

    needed = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "zmq", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError("serve", f"needs {', '.join(missing)}", install_extra("server"))
