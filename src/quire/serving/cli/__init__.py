"""The command line. Importing it is fast: each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from quire.runtime.lazy_methods import lazy_methods
from quire.serving.process.spawning import Spawned, spawned_engine
from quire.types.errors import ConfigError, DoesNotFit, InvalidRequest, QuireError

if TYPE_CHECKING:
    from quire.serving.cli.arguments import Commands, OneLineParser

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
_COMMANDS = (
    "serve", "route", "chat", "complete", "run-batch", "bench", "pull", "doctor", "tune", "quantize", "replay",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are printed as one line on stderr; `--debug` adds the
    traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _engine_ahead(words) as engine, lazy_methods():
            args = _parser(words[0] if words else "").parse_args(words)
            return _run(args, engine)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _engine_ahead(words: Sequence[str]) -> Iterator[Spawned | None]:
    """Start the engine process of `quire serve` before the flags are parsed, because importing torch is the longest
    part of the start. It is killed when the context ends, also if a flag is wrong."""
    is_server = words[:1] == ["serve"] and not {"-h", "--help"} & set(words)
    if not is_server or any(word.startswith("--replicas") for word in words):  # replicas have their own supervisors
        yield None
        return
    with ExitStack() as stack:
        engine = None
        with suppress(OSError):  # the supervisor tries again and reports the error
            engine = stack.enter_context(spawned_engine())
        yield engine


def _run(args: argparse.Namespace, engine: Spawned | None) -> int:
    try:
        return _command(args, engine)(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the final flush does not fail
        return FAILURE
    except Exception as error:  # noqa: BLE001 - every error becomes one line
        if args.debug:
            traceback.print_exc()
        print(f"quire: error: {_one_line(error)}", file=sys.stderr)
        usage = isinstance(error, ConfigError | InvalidRequest) and not isinstance(error, DoesNotFit)
        return USAGE_ERROR if usage else FAILURE


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, QuireError):
        return text
    return f"unexpected {type(error).__name__}: {text}; run again with --debug for the traceback"


def _parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of one command, or of all commands if there is none of this name."""
    from quire import __version__
    from quire.serving.cli.arguments import OneLineParser, examples

    parser = OneLineParser(
        prog="quire",
        description="Language-model inference with a paged KV cache and continuous batching.",
        **examples(
            {
                "quire serve": "an OpenAI-compatible server and a playground on http://127.0.0.1:8000",
                "quire chat": "chat with the default model in the terminal",
                "quire COMMAND --help": "explain the flags of a command, with examples",
            }
        ),
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in (command,) if command in _COMMANDS else _COMMANDS:
        _adder(name)(commands)
    return parser


def _adder(name: str) -> Callable[[Commands[OneLineParser]], None]:
    """Return the function that adds the flags of a command to the parser. Imports only what this command needs."""
    from quire.serving.cli import arguments

    common = {
        "chat": arguments.add_chat,
        "complete": arguments.add_complete,
        "pull": arguments.add_pull,
        "doctor": arguments.add_doctor,
    }
    if name in common:
        return common[name]
    if name == "serve":
        from quire.serving.cli.serve_flags import add_serve as add
    elif name == "route":
        from quire.serving.cli.route import add_route as add
    elif name == "run-batch":
        from quire.serving.cli.run_batch import add_run_batch as add
    elif name == "bench":
        from quire.serving.cli.bench_flags import add_bench as add
    elif name == "tune":
        from quire.serving.cli.tune import add_tune as add
    elif name == "quantize":
        from quire.serving.cli.quantize import add_quantize as add
    else:
        from quire.serving.cli.replay import add_replay as add
    return add


def _command(args: argparse.Namespace, engine: Spawned | None) -> Callable[[argparse.Namespace], int]:
    name = f"bench {args.bench_command}" if args.command == "bench" else args.command
    if name == "serve":
        from quire.serving.cli.serve import run_serve

        return partial(run_serve, engine=engine)
    if name == "route":
        from quire.serving.cli.route import run_route as run
    elif name == "complete":
        from quire.serving.cli.complete import run_complete as run
    elif name == "chat":
        from quire.serving.cli.chat import run_chat as run
    elif name == "run-batch":
        from quire.serving.cli.run_batch import run_batch as run
    elif name == "pull":
        from quire.serving.cli.pull import run_pull as run
    elif name == "doctor":
        from quire.serving.cli.doctor import run_doctor as run
    elif name == "tune":
        from quire.serving.cli.tune import run_tune as run
    elif name == "quantize":
        from quire.serving.cli.quantize import run_quantize as run
    elif name == "replay":
        from quire.serving.cli.replay import run_replay as run
    elif name == "bench serve":
        from quire.serving.bench.online import run_bench_serve as run
    elif name == "bench throughput":
        from quire.serving.bench.offline import run_bench_throughput as run
    else:
        from quire.serving.bench.offline import run_bench_latency as run
    return run
