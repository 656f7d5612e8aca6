"""`quire chat`: a conversation in the terminal, or one answer."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from quire.serving.cli.answer import Answerer, Message, answerer, read_piped, write_answer
from quire.serving.cli.remote import RemoteError
from quire.types.errors import InvalidRequest

HELP = """/help    this list
/reset   forget the conversation
/exit    leave (also Ctrl-D)
Ctrl-C ends an answer early."""


def run_chat(args: argparse.Namespace) -> int:
    message = args.message if args.message is not None else read_piped()
    if message is not None and not message.strip():
        raise InvalidRequest("MESSAGE", "is empty", "give a message, or pipe one in")
    with answerer(args) as model:
        conversation = Conversation(model, args.system_prompt)
        if message is None:
            _converse(conversation)
        else:
            conversation.say(message)
    return 0


class Conversation:
    """The messages so far. A refused message is dropped; of an interrupted answer, the part that has arrived is
    kept."""

    def __init__(self, model: Answerer, system_prompt: str | None) -> None:
        self._model, self._system_prompt = model, system_prompt
        self._messages: list[Message] = []
        self.reset()

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    def reset(self) -> None:
        system = self._system_prompt
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        """Send a message and write the answer to stdout."""
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            write_answer(self._model.chat(messages), answer)
        finally:
            if answer:
                self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


def _converse(conversation: Conversation) -> None:
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401 - gives input() history and line editing

    print("Type a message. /help lists the commands.", file=sys.stderr)
    while (line := _ask()) is not None:
        if line.startswith("/"):
            if line == "/exit":
                return
            _command(line, conversation)
        elif line:
            try:
                conversation.say(line)
            except KeyboardInterrupt:
                print("\n[interrupted]", file=sys.stderr)
            except InvalidRequest as error:
                print(f"{error} (or /reset to start over)", file=sys.stderr)
            except RemoteError as error:
                print(f"\n{error}", file=sys.stderr)


def _ask() -> str | None:
    """Read the next line. Returns None if the user presses Ctrl-D or Ctrl-C."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


def _command(line: str, conversation: Conversation) -> None:
    if line == "/help":
        print(HELP, file=sys.stderr)
    elif line == "/reset":
        conversation.reset()
        print("The conversation is forgotten.", file=sys.stderr)
    else:
        print(f"{line.split(maxsplit=1)[0]} is not a command; /help lists them", file=sys.stderr)
