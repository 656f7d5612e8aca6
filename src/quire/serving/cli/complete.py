"""`quire complete`: continue a text."""

from __future__ import annotations

import argparse

from quire.serving.cli.answer import answerer, read_piped, write_answer
from quire.types.errors import InvalidRequest


def run_complete(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.prompt is not None else read_piped()
    if not prompt:
        raise InvalidRequest("PROMPT", "is empty", "give a text to continue, or pipe one in")
    with answerer(args) as model:
        if args.n == 1:
            write_answer(model.complete(prompt), [])
            return 0
        for number, text in enumerate(model.samples(prompt), start=1):
            print(f"--- {number} of {args.n}\n{text}")
    return 0
