"""`quire complete`: continue a text."""

from __future__ import annotations

import argparse

from quire.serving.cli.answer import load, read_piped, write_answer
from quire.serving.cli.arguments import sampling_params
from quire.types.errors import InvalidRequest


def run_complete(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.prompt is not None else read_piped()
    if not prompt:
        raise InvalidRequest("PROMPT", "is empty", "give a text to continue, or pipe one in")
    sampling = sampling_params(args)
    with load(args) as llm:
        if sampling.n == 1:
            write_answer(llm.stream(prompt, sampling), [])
            return 0
        (output,) = llm.generate(prompt, sampling)
        for completion in output.outputs:
            print(f"--- {completion.index + 1} of {sampling.n}\n{completion.text}")
    return 0
