"""The child process that tries structured outputs: `python -m quire.serving.process.grammar_child FD`.

This process holds the vocabulary and compiles nothing itself. For each check it forks a process with limits on time and
memory. If that process fails or is killed, this one answers the check and continues.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.engine.decoding.vocabulary import Vocabulary
from quire.serving.text.answer_grammar import AnswerPlan, build_grammar, parts_of
from quire.types.errors import InvalidRequest

CPU_SECONDS = 0.5  # CPU time of one check: stops hostile grammars
WALL_SECONDS = 10.0  # elapsed time of one check: on a busy machine it gets little CPU time
MEMORY_BYTES = 256 << 20  # address space of a check, in addition to this process's
RESIDENT_BYTES = 32 << 20  # resident memory for compiling and following a grammar: the engine would use as much
FOLLOWED_TOKENS = 48  # tokens of an answer for which every grammar is followed ...
FOLLOW_SECONDS = 0.2  # ... or until this much CPU time is used
LAST_MASKS = 8  # number of last tokens over which the time is averaged
MASK_SECONDS = 0.01  # limit of the mean CPU time for one token; usually it is below 0.001
STACK_BYTES = 2 << 20  # less than any engine thread has
PARALLEL = 16  # checks at the same time, so that quick ones do not wait for slow ones
NICENESS = 5  # lower scheduling priority than the engine
TOO_LONG = "takes too long to compile"
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")  # removed from errors
_REASON_OF_SIGNAL: dict[int, str] = {
    signal.SIGSEGV: "is nested too deeply",
    signal.SIGABRT: "needs too much memory to compile",
}


def read_vocabulary(channel: Connection) -> Vocabulary:
    """Read the vocabulary that `write_vocabulary` sent. It cannot encode text."""
    special_ids = json.loads(channel.recv_bytes())
    lengths = array.array("I", channel.recv_bytes())
    blob, tokens, start = channel.recv_bytes(), [], 0
    for length in lengths:
        tokens.append(blob[start : start + length])
        start += length
    return Vocabulary(tokens, frozenset(special_ids), (), lambda _: ())


def write_vocabulary(channel: Connection, vocabulary: Vocabulary) -> None:
    channel.send_bytes(json.dumps(sorted(vocabulary.special_ids)).encode())
    channel.send_bytes(array.array("I", map(len, vocabulary.tokens)).tobytes())
    channel.send_bytes(b"".join(vocabulary.tokens))


def try_plan(tokens: GrammarTokens, plan: AnswerPlan) -> str:
    """Return the grammar of `plan` after compiling it and following it for some tokens. Raises InvalidRequest that
    names the invalid field."""
    grammar = build_grammar(plan)
    reason = _fault(tokens, grammar)
    if not reason:
        return grammar
    field_name = _field_at_fault(tokens, plan)
    raise InvalidRequest(field_name, reason if field_name.endswith(".grammar") else _PLACE.sub("", reason))


def _fault(tokens: GrammarTokens, grammar: str) -> str:
    """Compile a grammar and follow it for some tokens. Returns what is wrong with it, or ""."""
    before = _resident_bytes()
    state = tokens.begin(grammar)
    seconds: deque[float] = deque(maxlen=LAST_MASKS)
    began = time.thread_time()
    for _ in range(FOLLOWED_TOKENS):
        if state.is_error() or state.is_stopped() or time.thread_time() - began > FOLLOW_SECONDS:
            break
        mask_began = time.thread_time()
        bits, may_end = tokens.read_mask(state)
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            if not (may_end or seconds or state.is_error()):
                return "no text can match it"
            break
        word = int(bits[allowed[0]])
        state.try_consume_tokens([int(allowed[0]) * 32 + (word & -word).bit_length() - 1])
        seconds.append(time.thread_time() - mask_began)
    if state.is_error():
        return reason_of(state) or "cannot be compiled"
    if len(seconds) == LAST_MASKS and sum(seconds) > LAST_MASKS * MASK_SECONDS:
        return "takes too long to follow: every token would hold up other requests"
    return "needs too much memory" if _resident_bytes() - before > RESIDENT_BYTES else ""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _field_at_fault(tokens: GrammarTokens, plan: AnswerPlan) -> str:
    """Return the field of the first part of a plan that fails without the others, or the whole plan's field if none
    does."""
    parts = parts_of(plan)
    if len(parts) > 1:
        for field_name, part in parts:
            if _fault(tokens, build_grammar(part)):
                return field_name
    return parts[0][0] if len(parts) == 1 else plan.field


@dataclass(slots=True)
class _Check:
    """A forked process that tries a plan, and what it has sent so far."""

    number: int
    field_name: str  # the field that a refusal names
    pid: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)


class CheckServer:
    """Reads checks from its channel and answers each, until the channel is closed."""

    def __init__(self, channel: Connection, tokens: GrammarTokens) -> None:
        self._channel, self._tokens = channel, tokens
        self._waiting: deque[tuple[int, AnswerPlan]] = deque()
        self._running: dict[int, _Check] = {}  # by the read end of the pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._seconds_left()):
                if key.fd == self._channel.fileno():
                    try:
                        self._receive()
                    except (EOFError, OSError):
                        return
                else:
                    self._read(key.fd)
            self._end_overdue()
            while self._waiting and len(self._running) < PARALLEL:
                self._begin(*self._waiting.popleft())

    def _seconds_left(self) -> float | None:
        """Return the seconds until the first deadline; None if nothing runs."""
        if not self._running:
            return None
        return max(0.0, min(check.deadline for check in self._running.values()) - time.monotonic())

    def _receive(self) -> None:
        asked = json.loads(self._channel.recv_bytes())
        self._waiting.append((asked["number"], AnswerPlan.from_json(asked["plan"])))

    def _begin(self, number: int, plan: AnswerPlan) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            os.close(self._channel.fileno())
            _run_child(self._tokens, plan, theirs)
        os.close(theirs)
        self._running[ours] = _Check(number, plan.field, pid, time.monotonic() + WALL_SECONDS)
        self._selector.register(ours, selectors.EVENT_READ)

    def _read(self, pipe: int) -> None:
        data = os.read(pipe, 2**16)
        check = self._running[pipe]
        check.output += data
        if not data:
            self._finish(pipe, "")

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for pipe, check in list(self._running.items()):
            if now >= check.deadline:
                self._finish(pipe, TOO_LONG)

    def _finish(self, pipe: int, reason: str) -> None:
        """End a check: kill its process if it is late (`reason`), reap it, and send its result."""
        check = self._running.pop(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)
        if reason:
            with contextlib.suppress(ProcessLookupError):
                os.kill(check.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(check.pid, 0)[1])
        is_answered = status == 0 and not reason
        answer = json.loads(check.output) if is_answered else _refusal(check.field_name, reason or _exit_reason(status))
        # the same grammar crashes again; timeouts and kills by the system may be due to a busy machine
        answer["is_certain"] = is_answered or (not reason and -status in _REASON_OF_SIGNAL)
        with contextlib.suppress(OSError):  # the parent is gone; the next read ends this process
            self._channel.send_bytes(json.dumps({"number": check.number, **answer}).encode())


def _refusal(field_name: str, reason: str) -> dict[str, Any]:
    return {"field": field_name, "reason": reason, "fix": "send a simpler one"}


def _exit_reason(status: int) -> str:
    """Return the refusal reason for a process that ended with this status."""
    return _REASON_OF_SIGNAL.get(-status, TOO_LONG if status < 0 else "cannot be compiled")


def _run_child(tokens: GrammarTokens, plan: AnswerPlan, pipe: int) -> NoReturn:
    """Run in a forked process: set limits, try the plan, send the result, exit."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the message of a library that aborts
        _limit_resources()
        threading.stack_size(STACK_BYTES)
        answer: dict[str, Any] = {}
        worker = threading.Thread(target=lambda: answer.update(_answer(tokens, plan)))
        worker.start()
        worker.join()
        with os.fdopen(pipe, "wb") as out:
            out.write(json.dumps(answer).encode())
        code = 0 if answer else 1
    finally:
        os._exit(code)


def _answer(tokens: GrammarTokens, plan: AnswerPlan) -> dict[str, Any]:
    try:
        return {"grammar": try_plan(tokens, plan)}
    except InvalidRequest as error:
        return {"field": error.field, "reason": error.reason, "fix": error.fix}
    except MemoryError:
        return _refusal(plan.field, _exit_reason(-signal.SIGABRT))


def _limit_resources() -> None:
    """Limit this process to little CPU time and memory, and to no files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when the channel is closed
    os.nice(NICENESS)
    channel = Connection(int(arguments[0]))
    try:
        vocabulary = read_vocabulary(channel)
        tokens = GrammarTokens(vocabulary, len(vocabulary.tokens))
        channel.send_bytes(b"{}")
    except (EOFError, OSError):
        return 0
    CheckServer(channel, tokens).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
