"""The command line. Importing it is cheap: each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from quire import __version__
from quire.serving.cli.arguments import OneLineParser, add_chat, add_complete, add_doctor, add_pull
from quire.types.errors import ConfigError, DoesNotFit, InvalidRequest, QuireError

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors become one line on stderr; `--debug` adds the traceback."""
    args = _parser().parse_args(argv)
    try:
        return _command(args.command)(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing to flush to
        return FAILURE
    except Exception as error:  # noqa: BLE001 - the last line of defence
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


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="quire", description="Language-model inference with a paged KV cache and continuous batching."
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_complete(commands)
    add_chat(commands)
    add_pull(commands)
    add_doctor(commands)
    return parser


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    if name == "complete":
        from quire.serving.cli.complete import run_complete as run
    elif name == "chat":
        from quire.serving.cli.chat import run_chat as run
    elif name == "pull":
        from quire.serving.cli.pull import run_pull as run
    else:
        from quire.serving.cli.doctor import run_doctor as run
    return run
