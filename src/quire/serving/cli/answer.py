"""What the commands that generate share: loading the model, and writing an answer as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, TextIO

from quire.serving.cli.arguments import engine_settings
from quire.types.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.serving.llm import LLM, Stream


def load(args: argparse.Namespace) -> LLM:
    """The model the flags describe, loaded."""
    from quire.serving.llm import LLM

    return LLM(
        args.model,
        tokenizer=args.tokenizer,
        load_format=args.load_format,
        verbose=args.verbose,
        **engine_settings(args),
    )


def write_answer(pieces: Stream, answer: list[str]) -> None:
    """Write text to stdout as it comes and collect it in `answer`, which an interrupt leaves as far as it came."""
    num_tokens, start = 0, time.monotonic()
    with closing(pieces):
        for piece in pieces:
            num_tokens += len(piece.token_ids)
            if piece.text:
                answer.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if sys.stderr.isatty():
        seconds = max(time.monotonic() - start, 1e-9)
        print(f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s]", file=sys.stderr)


def read_piped() -> str | None:
    """All of stdin when it is not a terminal. Raises InvalidRequest when it is closed or holds no text."""
    stdin: TextIO | None = sys.stdin  # None: closed by whoever started this process
    if stdin is None:
        raise InvalidRequest("stdin", "is closed", "give the text as an argument")
    if stdin.isatty():
        return None
    try:
        text = stdin.read()
        text.encode()  # undecodable bytes may come as lone surrogates
    except UnicodeError:
        raise InvalidRequest("stdin", "is not UTF-8 text", "convert it, or give the text as an argument") from None
    except OSError as error:
        raise InvalidRequest("stdin", f"cannot be read: {error.strerror}", "give the text as an argument") from None
    return text
