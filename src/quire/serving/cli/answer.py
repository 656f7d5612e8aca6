"""What the commands that generate share: loading the model, and writing an answer as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from quire.serving.cli.arguments import engine_settings

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
    """All of stdin when it is not a terminal."""
    return None if sys.stdin.isatty() else sys.stdin.read()
