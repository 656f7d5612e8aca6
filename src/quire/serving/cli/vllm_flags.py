"""vLLM's flags on Quire's command line: flags with another name here are translated, flags without effect are accepted,
and all others are refused with an alternative."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from quire.serving.vllm_arguments import NO_EFFECT, OFF, RENAMED, REVISIONS, NoEffect, take_task, tuning, with_revision
from quire.types.errors import ConfigError

logger = logging.getLogger("quire")

HIGHEST_LOGPROBS = 2**20  # a limit that no vocabulary exceeds
_SHORT = {"-dp": "--data-parallel-size"}
_TASK_FLAGS = ("runner", "convert")
_ALWAYS = (None, False, True)  # the feature is always on, or never

OF_SERVERS: dict[str, NoEffect] = {
    # tools and templates
    "enable_auto_tool_choice": NoEffect(_ALWAYS),
    "exclude_tools_when_tool_choice_none": NoEffect(_ALWAYS),
    "tool_parser_plugin": NoEffect((None, ""), "use --tool-call-parser; no foreign code is loaded"),
    "tool_server": NoEffect((None,), "the client runs its tools; leave it out"),
    "enable_reasoning": NoEffect(_ALWAYS),
    "reasoning_config": tuning("--reasoning-parser knows the marks around reasoning", {}),
    "chat_template_content_format": tuning("messages are converted to what the template reads", "auto"),
    "trust_request_chat_template": NoEffect(OFF, "use --chat-template; requests cannot bring a template"),
    "response_role": NoEffect((None, "assistant"), "answers always have the role assistant; leave it out"),
    # answers
    "return_tokens_as_token_ids": NoEffect(OFF, "send return_tokens_as_token_ids with each request"),
    "enable_prompt_tokens_details": NoEffect(_ALWAYS),
    "enable_per_request_metrics": tuning("send the header X-Quire-Explain, or use --trace-endpoint", False),
    "enable_request_id_headers": NoEffect(_ALWAYS),
    "fingerprint_mode": tuning("system_fingerprint is a hash of version, model, dtype and device", "full", "hash"),
    # pages
    "enable_server_load_tracking": NoEffect(_ALWAYS),
    "enable_tokenizer_info_endpoint": NoEffect(_ALWAYS),
    "disable_fastapi_docs": tuning("only /openapi.json is served", False),
    "enable_offline_docs": tuning("only /openapi.json is served", False),
    # logs
    "log_config_file": tuning("use --log-level and --log-format"),
    "uvicorn_log_level": tuning("use --log-level", "info"),
    "disable_uvicorn_access_log": NoEffect(_ALWAYS),  # there is one only with --access-log
    "disable_access_log_for_endpoints": tuning("there is an access log only with --access-log"),
    "max_log_len": tuning("texts are not logged"),
    "enable_log_outputs": tuning("texts are not logged", False),
    "enable_log_deltas": NoEffect(_ALWAYS),
    "log_error_stack": tuning("use --log-level debug", False),
    # connections
    "middleware": NoEffect((None, []), "no foreign code is loaded; put a proxy before the server"),
    "allow_credentials": NoEffect(OFF, "pages of --cors-origin send API keys in headers, not in cookies; leave it out"),
    "allowed_methods": tuning("all methods of the API are allowed", ["*"]),
    "allowed_headers": tuning("all headers of the API are allowed", ["*"]),
    "ssl_ca_certs": NoEffect((None,), "certificates of clients are not checked; use --api-key"),
    "ssl_cert_reqs": NoEffect((None, 0), "certificates of clients are not checked; use --api-key"),
    "ssl_ciphers": NoEffect((None,), "put a proxy before the server"),
    "enable_ssl_refresh": NoEffect(OFF, "send the server SIGHUP for new certificates; leave it out"),
    "disable_frontend_multiprocessing": tuning("the engine always runs in a process of its own", False),
    "h11_max_incomplete_event_size": tuning("use --limit header_bytes=N"),
    "h11_max_header_count": tuning("use --limit header_bytes=N"),
}


def split_vllm_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split a command line into the words for `parser`, and the flags that only vLLM has, with their values. A flag
    that is given both whole and by members is an error of `parser`."""
    own: list[str] = []
    foreign: list[tuple[str, Any]] = []
    no_effect = _no_effect(parser)
    try:
        waiting = _respelled(words, parser, no_effect)
    except ConfigError as error:
        parser.error(str(error))
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag, flag).removeprefix("--").replace("-", "_")
        is_off = name.startswith("no_") and name[3:] in no_effect
        name = name[3:] if is_off else name
        if not word.startswith("-") or flag in parser._option_string_actions or not _is_vllms(name, no_effect):
            own.append(word)
        elif equals:
            foreign.append((name, _read(value)))
        elif is_off or (name in no_effect and no_effect[name].is_switch) or not waiting:
            foreign.append((name, not is_off))
        else:
            foreign.append((name, _read(waiting.pop(0))))
    return own, foreign


def _respelled(words: Sequence[str], parser: argparse.ArgumentParser, no_effect: Mapping[str, NoEffect]) -> list[str]:
    """Return the words with vLLM's other spellings resolved: underscores in place of dashes, and members of a JSON
    object as flags of their own, `--name.member VALUE`."""
    own, options, found = list(words), parser._option_string_actions, list[str]()
    members: dict[str, dict[str, Any]] = {}
    while own:
        word = own.pop(0)
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        name = name.replace("_", "-")
        is_known = name in options or _is_vllms(name.removeprefix("--").replace("-", "_"), no_effect)
        if not flag.startswith("--") or flag in options or not is_known:
            found.append(word)
        elif not dot:
            found.append(f"{name}{equals}{value}" if name in options else word)
        else:
            is_bare = not equals and (not own or own[0].startswith("--"))
            given = True if is_bare else _read(value if equals else own.pop(0))
            _put_member(members.setdefault(name, {}), path.split("."), given)
    for name, value_of in members.items():
        if any(word.partition("=")[0] == name for word in found):
            raise ConfigError(name.removeprefix("--"), "is given both whole and by members", "use one form")
        found += [name, json.dumps(value_of)]
    return found


def _put_member(holder: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *outer, last = (part.replace("-", "_") for part in path)
    for part in outer:
        inner = holder.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(".".join(path), f"{part} is given both whole and by members", "use one form")
        holder = inner
    holder[last] = value


def take_vllm_flags(foreign: Sequence[tuple[str, Any]], parsed: argparse.Namespace) -> None:
    """Set vLLM's flags in `parsed` under Quire's names. Raises ConfigError for unsupported values."""
    no_effect = NO_EFFECT | OF_SERVERS  # `split_vllm_flags` reads those of servers only for servers
    if hasattr(parsed, "task"):
        tasks = {name: value for name, value in foreign if name in _TASK_FLAGS}
        _, _, parsed.task = take_task({"task": parsed.task, **tasks})
        foreign = [(name, value) for name, value in foreign if name not in _TASK_FLAGS]
    for name, value in foreign:
        if name == "max_logprobs" and hasattr(parsed, "limit"):
            parsed.limit = [*parsed.limit, f"logprobs={HIGHEST_LOGPROBS if value == -1 else value}"]
        elif name in no_effect:
            warning = no_effect[name].check(name, value)
            if warning is not None:
                logger.warning("%s", warning)
        elif name in RENAMED:
            setattr(parsed, RENAMED[name], value)
        else:
            is_given = name == "revision" and getattr(parsed, "model_name", None) is not None
            target = "model_name" if is_given else REVISIONS[name]
            setattr(parsed, target, with_revision(getattr(parsed, target, None), name, value))


def _no_effect(parser: argparse.ArgumentParser) -> dict[str, NoEffect]:
    """Return the flags of vLLM that have no effect on one command."""
    is_server = "--limit" in parser._option_string_actions
    return NO_EFFECT | OF_SERVERS if is_server else NO_EFFECT


def _is_vllms(name: str, no_effect: Mapping[str, NoEffect]) -> bool:
    return name in no_effect or name in RENAMED or name in REVISIONS


def _read(text: str) -> Any:
    """Parse JSON (numbers, true, false, objects), or return the text unchanged."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
