"""Shared by `quire chat` and `quire complete`: the model that answers, here or at a server, and writing its answer to
stdout."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO, TypeAlias

from quire.serving.cli.arguments import ENGINE_FLAGS, ENGINE_SWITCHES, engine_settings, field_of, sampling_params
from quire.types.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from quire.serving.llm import LLM, Stream

Message: TypeAlias = dict[str, object]


class Piece(NamedTuple):
    """A piece of an answer, and the number of its tokens as far as known."""

    text: str
    num_tokens: int


Pieces: TypeAlias = Generator[Piece, None, None]


class Answerer(Protocol):
    """A model that answers, loaded here or behind a server. Closing an iterator early aborts its request."""

    def chat(self, messages: Sequence[Message]) -> Pieces: ...

    def complete(self, prompt: str) -> Pieces: ...

    def samples(self, prompt: str) -> list[str]:
        """Return all n completions of a prompt when they are finished."""


class LocalAnswerer:
    """Implements Answerer with a model in this process."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._llm, self._sampling = llm, sampling_params(args)
        self._chat_sampling = sampling_params(args, llm.get_default_sampling_params())

    def chat(self, messages: Sequence[Message]) -> Pieces:
        return _pieces(self._llm.stream_chat(messages, self._chat_sampling))

    def complete(self, prompt: str) -> Pieces:
        return _pieces(self._llm.stream(prompt, self._sampling))

    def samples(self, prompt: str) -> list[str]:
        (output,) = self._llm.generate(prompt, self._sampling)
        return [completion.text for completion in output.outputs]


@contextmanager
def answerer(args: argparse.Namespace) -> Iterator[Answerer]:
    """Return the Answerer that the flags select. Raises InvalidRequest or ConfigError before a model is loaded."""
    if args.url is not None:
        from quire.serving.cli.remote import RemoteAnswerer

        own = ("tokenizer", "load_format", "verbose", "generation_config", "override_generation_config")
        for name in (*own, *map(field_of, (*ENGINE_FLAGS, *ENGINE_SWITCHES))):
            if getattr(args, name, None) not in (None, "auto"):
                raise ConfigError(name, "is a setting of the server at --url", "leave it out")
        yield RemoteAnswerer(args)
        return
    if args.api_key is not None:
        raise ConfigError("api_key", "is for a server", "give --url too")
    sampling_params(args)
    with load(args) as llm:
        yield LocalAnswerer(llm, args)


def load(args: argparse.Namespace) -> LLM:
    """Load the model that the flags describe."""
    from quire.serving.llm import LLM

    return LLM(
        args.model,
        tokenizer=args.tokenizer,
        load_format=args.load_format,
        verbose=args.verbose,
        generation_config=getattr(args, "generation_config", None) or "auto",
        override_generation_config=getattr(args, "override_generation_config", None),
        **engine_settings(args),
    )


def write_answer(pieces: Pieces, answer: list[str]) -> None:
    """Write an answer to stdout while it arrives and append it to `answer`. After an interrupt, `answer` has the part
    that has arrived."""
    num_tokens, start = 0, time.monotonic()
    with closing(pieces):
        for piece in pieces:
            num_tokens += piece.num_tokens
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
    """Return all text of stdin, or None if stdin is a terminal. Raises InvalidRequest if it is closed or not UTF-8
    text."""
    stdin: TextIO | None = sys.stdin  # None: the parent process has closed it
    if stdin is None:
        raise InvalidRequest("stdin", "is closed", "give the text as an argument")
    if stdin.isatty():
        return None
    try:
        text = stdin.read()
        text.encode()  # raises for lone surrogates, which stand for undecodable bytes
    except UnicodeError:
        raise InvalidRequest("stdin", "is not UTF-8 text", "convert it, or give the text as an argument") from None
    except OSError as error:
        raise InvalidRequest("stdin", f"cannot be read: {error.strerror}", "give the text as an argument") from None
    return text


def _pieces(stream: Stream) -> Pieces:
    with closing(stream):
        for piece in stream:
            yield Piece(piece.text, len(piece.token_ids))
