"""`quire run-batch`: answers the requests of a JSONL file, by a server that it starts or one that already runs."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from quire.serving.batch_lines import (
    BatchLine,
    ResultFile,
    answered_keys,
    custom_id_of,
    error_line,
    is_asleep,
    is_result,
    read_line,
    read_lines,
    result_line,
)
from quire.serving.cli.arguments import Commands, OneLineParser, examples
from quire.serving.cli.remote import RawAnswer, RemoteError, Server
from quire.serving.cli.serve_flags import add_serve_flags
from quire.types.errors import ConfigError, InvalidRequest, QuireError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/responses")
MAX_LINE = 64 * 2**20  # bytes; the server's own limit is lower
MAX_TRIES = 5  # of a request that did not reach the server, or whose engine ended
MAX_CONCURRENCY = 4_096
_PR_SET_PDEATHSIG = 1
_READY = re.compile(r"Quire serves .* on (http://\S+) \(ready")
_OWN_FLAGS = ("help", "input_file", "output_file", "url", "concurrency", "api_key", "log_level", "debug")
_ADDRESS: dict[str, Any] = {  # settings of the server that a run starts for itself
    "host": "127.0.0.1",
    "port": 0,
    "uds": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "root_path": "",
    "no_playground": True,
}


class _RefusedFlag(argparse.Action):
    """A flag of `quire serve` that makes no sense for the server of a batch: its address, or what clients load while it
    runs."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any) -> None:
        flag = self.option_strings[0]
        parser.error(f"{flag} is a flag of `quire serve`: the server of a batch serves that batch alone; leave it out")


def add_run_batch(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer the requests of a JSONL batch file",
        description="Answer the requests of a file in OpenAI's batch format, one JSON object per line, and write one "
        "result per line as requests finish. Run it again to continue: successful requests are kept, others repeated.",
        **examples(
            {
                "quire run-batch -i in.jsonl -o out.jsonl": "with the default model, in a server for this batch",
                "quire run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000": "with a running server",
            }
        ),
    )
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="file with the requests, one JSON object per line"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="file for the results, one JSON object per line"
    )
    parser.add_argument("--url", help="use the running server at this URL instead of starting one")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="most requests that run at once (32)")
    add_serve_flags(parser)
    parser.set_defaults(log_level="warning", **_ADDRESS)
    described = {action.dest: action.default for action in parser._actions if action.dest not in _OWN_FLAGS}
    parser.set_defaults(server_flags=described)
    for name in (*_ADDRESS, "lora_dir", "weights_dir", "sleep_idle_seconds"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action=_RefusedFlag, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run_batch(args: argparse.Namespace) -> int:
    if not 1 <= args.concurrency <= MAX_CONCURRENCY:
        raise ConfigError("concurrency", f"must be in [1, {MAX_CONCURRENCY}], got {args.concurrency}")
    for name, default in args.server_flags.items() if args.url is not None else ():
        if getattr(args, name, default) != default:
            raise ConfigError(name.removesuffix("_name"), "is a setting of the server at --url", "leave it out")
    source, target = Path(args.input_file), Path(args.output_file)
    with _opened(source) as requests, _locked(target):
        _check_target(source, target)
        done = answered_keys(target, keeps_failures=False)
        with _server(args) as server:
            run = BatchFile(server, target, done)
            run.answer(requests, args.concurrency)
    before = f", {len(done)} were answered before" if done else ""
    print(f"{run.num_succeeded} requests succeeded, {run.num_failed} failed{before}: {target}", file=sys.stderr)
    return 0


class BatchFile:
    """Answers the lines of one file with threads, and appends each result to `target` when it arrives."""

    def __init__(self, server: Server, target: Path, done: set[str]) -> None:
        self._server, self._target, self._done = server, target, done
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.num_succeeded = self.num_failed = 0

    def answer(self, requests: BinaryIO, concurrency: int) -> None:
        """Answer all lines. Raises RemoteError if the server is gone; results so far are kept."""
        seen: set[str] = set()
        running: set[Future[None]] = set()
        with ResultFile(self._target) as output, ThreadPoolExecutor(concurrency) as pool:
            try:
                for number, text in read_lines(requests, MAX_LINE):
                    line = self._read(number, text, seen, output)
                    if line is None or line.custom_id in self._done:
                        continue
                    if len(running) >= 2 * concurrency:
                        running = self._collect(running)
                    running.add(pool.submit(self._answer_line, line, output))
                while running:
                    running = self._collect(running)
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _read(self, number: int, text: bytes | None, seen: set[str], output: ResultFile) -> BatchLine | None:
        """Read a line. For an invalid line, write an error result and return None."""
        try:
            if text is None:
                raise InvalidRequest(f"line {number}", f"is above {MAX_LINE} bytes", "split it")
            line = read_line(number, text, URLS)
            if line.custom_id in seen:
                raise InvalidRequest(f"line {number}: custom_id", "is that of another line", "choose another")
        except InvalidRequest as error:
            name = None if text is None else custom_id_of(text)
            self._write(output, error_line(name, "invalid_line", str(error), number), is_failure=True)
            return None
        seen.add(line.custom_id)
        return line

    @staticmethod
    def _collect(running: set[Future[None]]) -> set[Future[None]]:
        """Wait for a request to end, and raise its error if it failed. Returns the requests that still run."""
        done, rest = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        return rest

    def _answer_line(self, line: BatchLine, output: ResultFile) -> None:
        answer = self._ask(line)
        if answer is None:
            return
        try:
            json.loads(answer.data)
            body = answer.data
        except ValueError:
            body = json.dumps(answer.data[:1_000].decode("utf-8", "replace")).encode()
        made = result_line(line.custom_id, answer.request_id, answer.status, body)
        self._write(output, made, is_failure=answer.status != 200)

    def _ask(self, line: BatchLine) -> RawAnswer | None:
        """Send a line. Tries again if the server is full or unavailable, and as long as it sleeps. Returns None if the
        run was stopped."""
        body, num_tries = json.dumps(line.body).encode(), 0
        while not self._stopped.is_set():
            try:
                answer = self._server.post(line.url, body)
                if answer.status in (401, 403):
                    raise ConfigError("api_key", "is not taken by the server", "give the right --api-key")
                num_tries += answer.status == 503 and not is_asleep(answer.status, answer.data)
                if answer.status not in (429, 503) or num_tries >= MAX_TRIES:
                    return answer
                self._stopped.wait(answer.retry_after)
            except RemoteError:
                num_tries += 1
                if num_tries >= MAX_TRIES:
                    raise
                self._stopped.wait(2.0**num_tries / 2)
        return None

    def _write(self, output: ResultFile, line: bytes, *, is_failure: bool) -> None:
        with self._lock:
            output.append(line)
            self.num_failed += is_failure
            self.num_succeeded += not is_failure


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError("input_file", f"{path} cannot be read: {error.strerror}", "give another file") from None
    with file:
        yield file


def _check_target(source: Path, target: Path) -> None:
    """Refuse an output file that must not be overwritten: the input file, a device, or a file that has other lines than
    results."""
    if not target.exists():
        return
    if target.samefile(source):
        raise ConfigError("output_file", f"{target} is the input file too", "choose another")
    if not target.is_file():
        raise ConfigError("output_file", f"{target} is not a plain file", "choose another")
    with target.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not is_result(line):
                reason = f"{target} exists, and line {number} of it is not the result of a batch request"
                raise ConfigError("output_file", reason, "choose another, or remove it")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock `path` against other runs that write the same file."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = lock_path.open("wb")
    except OSError as error:
        raise ConfigError("output_file", f"{path} cannot be written: {error.strerror}", "choose another") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("output_file", f"another run writes {path}", "choose another, or wait") from None
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[Server]:
    """Return the server at --url, or start one that runs until the context ends."""
    if args.url is not None:
        yield Server(args.url, args.api_key[0] if args.api_key else None)
        return
    key = secrets.token_urlsafe(24)
    args.api_key = [key]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_serve(args, reading, writing))
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as said:
            match = next((found for line in said if (found := _READY.search(line))), None)
            if match is None:
                raise QuireError("the server did not start; the cause is above")
            yield Server(match[1], key)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


def _serve(args: argparse.Namespace, reading: int, writing: int) -> int:
    """Run the server in the child process until the parent stops it or ends."""
    os.close(reading)
    os.setsid()  # so that Ctrl-C does not reach the server, which can still finish requests
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        from quire.serving.cli.serve import server_config
        from quire.serving.process.announcing import Announcer
        from quire.serving.process.supervisor import Supervisor

        with os.fdopen(writing, "w", encoding="utf-8") as out:
            config, keys = server_config(args)
            return Supervisor(config, keys=keys, announcer=Announcer(out=out)).run()
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
