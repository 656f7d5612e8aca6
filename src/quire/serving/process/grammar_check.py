"""Checks structured outputs before a request is accepted: a grammar is tried in a child process that may be killed."""

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

MAX_WAITING = 64  # checks that run or wait in one checker
MAX_KEPT = 256  # results in the cache ...
MAX_KEPT_CHARACTERS = 8 << 20  # ... and the sum of their plans' characters
START_SECONDS = 60.0  # for the child process to read the vocabulary
_CHILD = "quire.serving.process.grammar_child"
_EXIT_SECONDS = 2.0
LOST = "the process that checks structured outputs was lost; send the request again"


class ChecksBusy(QuireError):
    """Too many structured outputs wait to be checked. The request may be sent again."""


class GrammarChecker:
    """Turns answer plans into checked grammars. Thread-safe.

    The child process builds the whole grammar, tries it, and returns exactly the text it has tried. Only this class
    makes a CheckedGrammar.

    The child starts with the first check, which takes some tenths of a second; servers without structured outputs spend
    no memory on it. It is started again if it is lost. Results are cached, except refusals by a timeout, which might
    not happen again.
    """

    def __init__(self, source: VocabularySource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._kept: OrderedDict[AnswerPlan, _Outcome] = OrderedDict()
        self._kept_characters = 0

    def check(self, plan: AnswerPlan) -> CheckedGrammar:
        """Return the grammar of `plan`; blocks. Raises InvalidRequest that names the invalid field, or ChecksBusy."""
        return self.begin(plan).result()

    def begin(self, plan: AnswerPlan) -> Future[CheckedGrammar]:
        """Start a check. The future gets the grammar or the error, and cannot be cancelled. Raises ChecksBusy,
        InvalidRequest if llguidance is missing, or QuireError if the child process cannot be started."""
        answer: Future[CheckedGrammar] = Future()
        answer.set_running_or_notify_cancel()
        outcome = self._find(plan)
        if outcome is None:
            self._running_child().ask(plan, lambda found: self._finish(plan, answer, found))
        else:
            outcome.put_into(answer)
        return answer

    def close(self) -> None:
        """End the child process. Idempotent."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _running_child(self) -> _Child:
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

    def _finish(self, plan: AnswerPlan, answer: Future[CheckedGrammar], outcome: _Outcome) -> None:
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
    """The result of a check. `put_into` makes a new exception each time, since a raised one keeps its traceback."""

    grammar: str = ""
    error: tuple[str, str, str] | None = None  # field, reason, fix
    is_lost: bool = False  # the child ended before it answered
    is_certain: bool = True

    def put_into(self, answer: Future[CheckedGrammar]) -> None:
        if self.is_lost:
            answer.set_exception(QuireError(LOST))
        elif self.error is not None:
            answer.set_exception(InvalidRequest(*self.error))
        else:
            answer.set_result(CheckedGrammar.of(self.grammar))


class _Child:
    """The child process that tries grammars, and the thread that reads its results."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _CHILD, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(
                    PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
                    OPENBLAS_NUM_THREADS="1",  # the child forks, which is safe only without other threads
                ),
                process_group=0,  # so that Ctrl-C does not reach it
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
        """Send a plan to be tried. `then` is called with the result on the reader's thread. Raises ChecksBusy, or
        QuireError if the process is lost."""
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
            if self._asked.pop(number, None) is not None:  # otherwise the reader has set the result already
                raise QuireError(LOST) from None

    def close(self) -> None:
        """End the process. Open checks end with an error."""
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
                answer = json.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                break
            self._asked.pop(answer.pop("number"))(_read_outcome(answer))
        self.is_lost = True
        self._channel.close()
        while self._asked:
            _, then = self._asked.popitem()
            then(_Outcome(is_lost=True, is_certain=False))


def _read_outcome(answer: dict[str, Any]) -> _Outcome:
    if "grammar" in answer:
        return _Outcome(grammar=answer["grammar"])
    return _Outcome(error=(answer["field"], answer["reason"], answer["fix"]), is_certain=answer["is_certain"])
