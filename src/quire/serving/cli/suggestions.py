"""What the command line answers to a flag or command it does not know: the closest own one, or the one that other
engines' users mean. Flags of vLLM that ask for nothing are accepted."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from quire.serving.vllm_arguments import NO_EFFECT, RENAMED, REVISIONS, with_revision

logger = logging.getLogger("quire")

COMMANDS = {
    "run": "chat",  # Ollama
    "start": "serve",
    "server": "serve",
    "launch": "serve",
    "launch_server": "serve",
    "generate": "complete",
    "completion": "complete",
    "download": "pull",
    "benchmark": "bench",
    "collect-env": "doctor",
    "info": "doctor",
}
FLAGS = {
    # llama.cpp
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "-t": "--threads",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    "--gpu-layers": "--device",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-hf": "--model",
    "--hf-repo": "--model",
    "--alias": "--served-model-name",
    "-ctk": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--model-draft": "--speculative-config",
    "-md": "--speculative-config",
    "--chat-template-file": "--chat-template",
    "-sys": "--system-prompt",
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-running-requests": "--max-num-seqs",
    "--schedule-policy": "--policy",
    "--tp-size": "--tensor-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    # vLLM
    "--api-server-count": "--api-workers",
    "--allowed-origins": "--cors-origin",
    "--otlp-traces-endpoint": "--trace-endpoint",
    "--max-new-tokens": "--max-tokens",
}
_MIN_BEGINNING = 4  # characters of a flag that are more than a letter or two
_SHORT = {"-dp": "--data-parallel-size"}


def closest_command(name: str, known: Iterable[str]) -> str | None:
    """Return the command that somebody who typed `name` means, if there is one."""
    meant = COMMANDS.get(name)
    return meant if meant in (names := tuple(known)) else next(iter(difflib.get_close_matches(name, names, n=1)), None)


def unknown_flags(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return what to say about arguments that `parser` does not know."""
    names = {flag: flag for flag in parser._option_string_actions if flag.startswith("--")}
    names = {flag: own for flag, own in FLAGS.items() if own in names} | names
    hints: list[str] = []
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        longer = [name for name in names if len(flag) > _MIN_BEGINNING and name.startswith(f"{flag}-")]
        close = [flag] if flag in names else longer[:1] or difflib.get_close_matches(flag, names, n=1)
        hints += [f"did you mean {names[one]} instead of {flag}?" for one in close]
    return f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; {hint}" for hint in hints)


def split_vllm_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split a command line into the words for `parser`, and flags that only vLLM has, with their values."""
    own: list[str] = []
    foreign: list[tuple[str, Any]] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag, flag).removeprefix("--").replace("-", "_")
        is_off = name.startswith("no_") and name[3:] in NO_EFFECT
        name = name[3:] if is_off else name
        if not word.startswith("-") or flag in parser._option_string_actions or not _is_vllms(name):
            own.append(word)
        elif equals:
            foreign.append((name, _read(value)))
        elif is_off or (name in NO_EFFECT and NO_EFFECT[name].is_switch) or not waiting:
            foreign.append((name, not is_off))
        else:
            foreign.append((name, _read(waiting.pop(0))))
    return own, foreign


def take_vllm_flags(foreign: Sequence[tuple[str, Any]], parsed: argparse.Namespace) -> None:
    """Put flags of vLLM into `parsed` under their names here. Raises ConfigError for what is not supported."""
    for name, value in foreign:
        if name in NO_EFFECT:
            warning = NO_EFFECT[name].check(name, value)
            if warning is not None:
                logger.warning("%s", warning)
        elif name in RENAMED:
            setattr(parsed, RENAMED[name], value)
        else:
            is_given = name == "revision" and getattr(parsed, "model_name", None) is not None
            target = "model_name" if is_given else REVISIONS[name]
            setattr(parsed, target, with_revision(getattr(parsed, target, None), name, value))


def _is_vllms(name: str) -> bool:
    return name in NO_EFFECT or name in RENAMED or name in REVISIONS


def _read(text: str) -> Any:
    """Return a number, a truth value or an object for its JSON, other text as it is."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
