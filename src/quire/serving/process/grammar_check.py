"""The check at the door: a structured output is tried in a process that may be killed before anything depends on it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from quire.config.environment import child_environment
from quire.engine.decoding.vocabulary import Vocabulary, VocabularySource
from quire.serving.process.grammar_child import write_vocabulary
from quire.serving.text.answer_grammar import AnswerPlan
from quire.types.errors import InvalidRequest, QuireError
from quire.types.grammar import CheckedGrammar
from quire.types.install import install_extra

MAX_WAITING = 64  # checks under way or waiting at one checker
MAX_KEPT = 256  # answers that are remembered ...
MAX_KEPT_CHARACTERS = 8 << 20  # ... and how much text they are together
START_SECONDS = 60.0  # for the child process to read the vocabulary
_CHILD = "quire.serving.process.grammar_child"
_EXIT_SECONDS = 2.0
LOST = "the process that checks structured outputs was lost; send the request again"


class ChecksBusy(QuireError):
    """Too many structured outputs wait to be checked; the request may be sent again."""


class GrammarChecker:
    """Turns plans of answers into grammars that the engine can trust. Thread-safe.

    The child builds the whole grammar and tries it. What it tried is what comes back, as a CheckedGrammar; nothing
    else makes one.

    Its one child process starts with the first check, which costs that one some tenths of a second and servers without
    structured outputs no memory, and again when it was lost. Answers are kept, but for refusals by the clock, which
    another time might not refuse.
    """

    def __init__(self, source: VocabularySource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._kept: OrderedDict[AnswerPlan, _Outcome] = OrderedDict()
        self._kept_characters = 0

    def check(self, plan: AnswerPlan) -> CheckedGrammar:
        """Wait for the grammar of `plan`. Raises InvalidRequest naming the field at fault, or ChecksBusy."""
        return self.begin(plan).result()

    def begin(self, plan: AnswerPlan) -> Future[CheckedGrammar]:
        """`check` without the wait; the future holds the grammar or the error, and cannot be cancelled."""
        answer: Future[CheckedGrammar] = Future()
        answer.set_running_or_notify_cancel()
        outcome = self._find(plan)
        if outcome is None:
            self._living_child().ask(plan, lambda found: self._settle(plan, answer, found))
        else:
            outcome.put_into(answer)
        return answer

    def close(self) -> None:
        """End the child. Idempotent."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _living_child(self) -> _Child:
        with self._lock:
            if self._child is None or self._child.is_lost:
                if importlib.util.find_spec("llguidance") is None:
                    fix = install_extra("structured")
                    raise InvalidRequest("structured_outputs", "needs the llguidance package", fix)
                if self._child is not None:
                    self._child.close()
                self._child = _Child(self._source())
            return self._child

    def _find(self, plan: AnswerPlan) -> _Outcome | None:
        with self._lock:
            if plan in self._kept:
                self._kept.move_to_end(plan)
            return self._kept.get(plan)

    def _settle(self, plan: AnswerPlan, answer: Future[CheckedGrammar], outcome: _Outcome) -> None:
        if outcome.is_certain:
            with self._lock:
                if plan not in self._kept:
                    self._kept_characters += plan.size
                self._kept[plan] = outcome
                while len(self._kept) > MAX_KEPT or self._kept_characters > MAX_KEPT_CHARACTERS:
                    dropped, _ = self._kept.popitem(last=False)
                    self._kept_characters -= dropped.size
        outcome.put_into(answer)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a check went. Errors are made anew for everyone who meets them: a raised one remembers who raised it."""

    grammar: str = ""
    error: tuple[str, str, str] | None = None  # field, reason, fix
    is_lost: bool = False  # the child was, before it answered
    is_certain: bool = True

    def put_into(self, answer: Future[CheckedGrammar]) -> None:
        if self.is_lost:
            answer.set_exception(QuireError(LOST))
        elif self.error is not None:
            answer.set_exception(InvalidRequest(*self.error))
        else:
            answer.set_result(CheckedGrammar.of(self.grammar))


class _Child:
    """The process that tries structures, and the thread that reads its answers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _CHILD, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(
                    PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
                    OPENBLAS_NUM_THREADS="1",  # it forks, which is safe only without other threads
                ),
                process_group=0,  # Ctrl-C reaches whoever started it alone
            )
        self._channel = Connection(os.dup(self._socket.fileno()))
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._asked: dict[int, Callable[[_Outcome], None]] = {}
        self.is_lost = False
        try:
            write_vocabulary(self._channel, vocabulary)
            if not self._channel.poll(START_SECONDS):
                raise EOFError
            self._channel.recv_bytes()
        except (EOFError, OSError):
            self.close()
            raise QuireError("the process that checks structured outputs could not be started") from None
        self._reader = threading.Thread(target=self._read, name="grammar-check", daemon=True)
        self._reader.start()

    def ask(self, plan: AnswerPlan, then: Callable[[_Outcome], None]) -> None:
        """Have a plan tried; `then` is called on the reader's thread. Raises ChecksBusy."""
        if len(self._asked) >= MAX_WAITING:
            raise ChecksBusy("too many structured outputs wait to be checked; send the request again")
        number = next(self._numbers)
        question = {"number": number, "plan": plan.to_json()}
        self._asked[number] = then
        try:
            with self._sending:
                self._channel.send_bytes(json.dumps(question).encode())
        except OSError:
            self.is_lost = True
            if self._asked.pop(number, None) is not None:  # else the reader has answered it already
                raise QuireError(LOST) from None

    def close(self) -> None:
        """End the process; what was asked of it is answered by its loss."""
        self.is_lost = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        while True:
            try:
                said = json.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                break
            self._asked.pop(said.pop("number"))(_read_outcome(said))
        self.is_lost = True
        self._channel.close()
        while self._asked:
            _, then = self._asked.popitem()
            then(_Outcome(is_lost=True, is_certain=False))


def _read_outcome(said: dict[str, Any]) -> _Outcome:
    if "grammar" in said:
        return _Outcome(grammar=said["grammar"])
    return _Outcome(error=(said["field"], said["reason"], said["fix"]), is_certain=said["is_certain"])
