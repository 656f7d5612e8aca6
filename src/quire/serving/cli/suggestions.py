"""Suggestions for unknown flags and commands: the closest name, or the equivalent of another engine's name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence

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
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "-sys": "--system-prompt",
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-running-requests": "--max-num-seqs",
    "--schedule-policy": "--policy",
    "--speculative-algorithm": "--speculative-config",
    "--speculative-num-steps": "--speculative-config",
    "--speculative-num-draft-tokens": "--speculative-config",
    "--tp-size": "--tensor-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    # vLLM
    "--api-server-count": "--api-workers",
    "--allowed-origins": "--cors-origin",
    "--otlp-traces-endpoint": "--trace-endpoint",
    "--max-new-tokens": "--max-tokens",
}
_MIN_BEGINNING = 4  # a flag must be longer than this to be completed


def closest_command(name: str, known: Iterable[str]) -> str | None:
    """Return the known command that is the equivalent of `name` or the closest to it, or None."""
    meant = COMMANDS.get(name)
    return meant if meant in (names := tuple(known)) else next(iter(difflib.get_close_matches(name, names, n=1)), None)


def unknown_flags(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the error message for arguments that `parser` does not know."""
    names = {flag: flag for flag in parser._option_string_actions if flag.startswith("--")}
    names = {flag: own for flag, own in FLAGS.items() if own in names} | names
    hints: list[str] = []
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        longer = [name for name in names if len(flag) > _MIN_BEGINNING and name.startswith(f"{flag}-")]
        close = [flag] if flag in names else longer[:1] or difflib.get_close_matches(flag, names, n=1)
        hints += [f"did you mean {names[one]} instead of {flag}?" for one in close]
    return f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; {hint}" for hint in hints)
