"""Runs the lines of one batch and writes their results as they are produced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from quire.serving.batch_lines import (
    ResultFile,
    answered_keys,
    custom_id_of,
    error_key,
    error_line,
    is_asleep,
    read_line,
    read_lines,
    result_line,
)
from quire.serving.http.batches.batch_store import Batch, BatchStore
from quire.serving.http.batches.file_store import FileStore, StoredFile, epoch_seconds
from quire.serving.http.batches.gate import BackgroundGate, Permit
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import AsgiHandler
from quire.serving.http.inner_call import InnerResponse, call_endpoint
from quire.types.errors import InvalidRequest, QuireError

WATCH_SECONDS = 0.25  # how often to check whether the batch was cancelled or has expired
SAVE_SECONDS = 0.5  # minimum time between two writes of a batch's counts
ROOM_SECONDS = 2.0  # how often to look up how many bytes the owner may still store
MAX_TRIES = 5  # attempts of one line that are answered with 503, unless the engine sleeps
ASLEEP_SECONDS = 2.0  # between two attempts of a line while the engine sleeps
BACKGROUND_PRIORITY = 1_000_000  # with policy "priority": after all other requests


class BatchFailed(QuireError):
    """The batch cannot be run. The message is shown to its owner."""


@dataclass(frozen=True, slots=True)
class Call:
    """The request of one line: an endpoint and the JSON body to send it."""

    custom_id: str
    url: str
    body: bytes


class BatchRun:
    """One run of one batch, which continues where the last run stopped. The result of a line is written to a file as
    soon as the line has finished.

    A line that is invalid or fails gets an entry in the error file; the other lines are still run.
    """

    def __init__(
        self,
        batch: Batch,
        files: FileStore,
        batches: BatchStore,
        handler: AsgiHandler,
        gate: BackgroundGate,
        limits: Mapping[str, int],
    ) -> None:
        self._batch, self._files, self._batches = batch, files, batches
        self._handler, self._gate, self._limits = handler, gate, limits
        self._seen: set[str] = set()  # custom_ids of this run
        self._saved_at = 0.0
        self._room, self._room_checked_at = 0, 0.0  # bytes that the owner may still store, and when that was looked up
        self._reading = asyncio.Lock()
        self._stopped_by: str | None = None  # "cancelled" or "expired" if the run ended early

    async def run(self) -> None:
        """Run the batch until it ends or the server shuts down. Raises BatchFailed."""
        source = await self._input()
        output, errors = await asyncio.to_thread(self._outputs)
        try:
            if await self._run_lines(source, output, errors):
                await self._finalize(output, errors)
        except Exception:
            await self._publish_results(output, errors)
            raise

    async def _run_lines(self, source: StoredFile, output: StoredFile, errors: StoredFile) -> bool:
        """Run all lines that have no result yet. Returns False if the server shuts down first; the next start of the
        server continues the batch."""
        batch, path_of = self._batch, self._files.data_path
        answered = await asyncio.to_thread(answered_keys, path_of(output), keeps_failures=True)
        refused = await asyncio.to_thread(answered_keys, path_of(errors), keeps_failures=True)
        batch.completed, batch.failed, self._done = len(answered), len(refused), answered | refused
        batch.enter("in_progress")
        await self._save()
        with ExitStack() as stack:
            file = stack.enter_context(path_of(source).open("rb"))
            self._lines = read_lines(file, self._limits["body_bytes"] + 4_096)
            self._output = stack.enter_context(ResultFile(path_of(output)))
            self._errors = stack.enter_context(ResultFile(path_of(errors)))
            await self._work()
        is_cut_off = self._gate.is_closed and self._stopped_by is None
        if is_cut_off and batch.completed + batch.failed < batch.total:
            await self._save()
            return False
        return True

    async def _input(self) -> StoredFile:
        """Return the input file, after counting its lines. Raises BatchFailed if it is gone or has too many lines."""
        batch = self._batch
        try:
            source = await asyncio.to_thread(self._files.get, batch.owner, batch.input_file_id)
        except ApiError:
            raise BatchFailed("the input file was deleted") from None
        batch.total = await asyncio.to_thread(self._count, source)
        if not 0 < batch.total <= self._limits["batch_lines"]:
            raise BatchFailed(
                f"the input file has {batch.total} requests, must be in [1, {self._limits['batch_lines']}]"
            )
        return source

    def _count(self, source: StoredFile) -> int:
        with self._files.data_path(source).open("rb") as file:
            return sum(1 for _ in read_lines(file, self._limits["body_bytes"] + 4_096))

    def _outputs(self) -> tuple[StoredFile, StoredFile]:
        """Return the output file and the error file of the batch. They are created by its first run and reused by later
        ones."""
        batch, purpose = self._batch, "batch_output"
        names = (f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl")
        if not batch.reserved:
            try:
                batch.reserved = [file.id for file in self._files.begin(batch.owner, names, purpose)]
            except ApiError as error:
                raise BatchFailed(str(error)) from None
            self._batches.save(batch)
        one, two = (
            StoredFile(file_id, batch.owner, name, purpose, batch.created_at)
            for file_id, name in zip(batch.reserved, names, strict=True)
        )
        return one, two

    async def _work(self) -> None:
        workers = [asyncio.create_task(self._worker()) for _ in range(self._limits["batch_requests"])]
        watcher = asyncio.create_task(self._watch(workers))
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            if self._stopped_by is None:
                raise
        finally:
            for task in (watcher, *workers):
                task.cancel()
            await asyncio.gather(watcher, *workers, return_exceptions=True)

    async def _watch(self, workers: list[asyncio.Task[None]]) -> None:
        """Stop the workers when the batch is cancelled or expires."""
        while self._stopped_by is None:
            if self._batches.is_cancelled(self._batch):
                self._stopped_by = "cancelled"
            elif epoch_seconds() >= self._batch.expires_at:
                self._stopped_by = "expired"
            else:
                await asyncio.sleep(WATCH_SECONDS)
        for worker in workers:
            worker.cancel()

    async def _worker(self) -> None:
        """Run one line after the other. A line is read only after the gate has admitted the worker, so that waiting
        batches hold no lines in memory."""
        while (permit := await self._gate.enter()) is not None:
            try:
                async with self._reading:
                    number, text = await asyncio.to_thread(self._next_line)
                if number is None or not await self._answer(number, text, permit):
                    return
            finally:
                permit.release()

    def _next_line(self) -> tuple[int | None, bytes | None]:
        """Return the number and the text of the next line that has no entry in the error file, or (None, None) after
        the last line."""
        return next(
            ((number, text) for number, text in self._lines if error_key(number) not in self._done), (None, None)
        )

    async def _answer(self, number: int, text: bytes | None, permit: Permit) -> bool:
        """Run one line and write its result. Returns False if the server shuts down before there is one."""
        try:
            if text is None:
                raise InvalidRequest(f"line {number}", f"is above {self._limits['body_bytes']} bytes", "split it")
            call = await asyncio.to_thread(self._read_call, number, text)
            if call.custom_id in self._seen:
                raise InvalidRequest(f"line {number}: custom_id", "is used by another line", "choose another")
        except InvalidRequest as error:
            name = None if text is None else custom_id_of(text)
            await self._write(self._errors, error_line(name, "invalid_line", str(error), number), is_failure=True)
            return True
        self._seen.add(call.custom_id)
        if call.custom_id in self._done:
            return True
        response = await self._send(call, permit)
        if response is None:
            return False
        failed = response.status != 200
        made = result_line(call.custom_id, response.request_id, response.status, response.body)
        await self._write(self._errors if failed else self._output, made, is_failure=failed)
        return True

    def _read_call(self, number: int, text: bytes) -> Call:
        """Parse one line. Raises InvalidRequest."""
        line = read_line(number, text, (self._batch.endpoint,))
        body = {"priority": BACKGROUND_PRIORITY, **line.body} if self._gate.knows_priorities else line.body
        try:
            return Call(line.custom_id, line.url, msgspec.json.encode(body))
        except (ValueError, OverflowError, RecursionError):  # lone surrogate, number out of range, nesting
            reason = "contains text or numbers that JSON cannot represent"
            raise InvalidRequest(f"line {number}: body", reason, "write UTF-8 and numbers of 64 bits") from None

    async def _send(self, call: Call, permit: Permit) -> InnerResponse | None:
        """Send a line to its endpoint, and retry it while the server is full (429), sleeps, or is unavailable (503, at
        most MAX_TRIES times). Returns None if the server shuts down."""
        num_tries = 0
        while True:
            response = await call_endpoint(self._handler, call.url, call.body, self._batch.owner)
            sleeps = is_asleep(response.status, response.body)
            num_tries += response.status == 503 and not sleeps
            if response.status not in (429, 503) or num_tries >= MAX_TRIES:
                return response
            if not await permit.wait_for_retry(ASLEEP_SECONDS if sleeps else response.retry_after):
                return None

    async def _write(self, file: ResultFile, line: bytes, *, is_failure: bool) -> None:
        """Append a result to one of the files, and update the counts of the batch. Raises BatchFailed if the owner's
        files are full."""
        if len(line) > self._room or time.monotonic() - self._room_checked_at >= ROOM_SECONDS:
            self._room_checked_at = time.monotonic()
            self._room = await asyncio.to_thread(self._files.room, self._batch.owner)
        self._room -= len(line)
        if self._room < 0:
            raise BatchFailed(f"its results cannot be stored; {self._files.bounds}; delete some (DELETE /v1/files/ID)")
        file.append(line)
        self._batch.failed += is_failure
        self._batch.completed += not is_failure
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            await self._save()

    async def _save(self) -> None:
        self._saved_at = time.monotonic()
        await asyncio.to_thread(self._batches.save, self._batch)

    async def _finalize(self, output: StoredFile, errors: StoredFile) -> None:
        """Publish the result files and the final state of the batch."""
        batch = self._batch
        if self._stopped_by == "cancelled":
            batch.enter("cancelling")
        batch.enter("finalizing")
        await self._publish_results(output, errors)
        batch.enter(self._stopped_by or "completed")
        await self._save()

    async def _publish_results(self, output: StoredFile, errors: StoredFile) -> None:
        self._batch.output_file_id = await asyncio.to_thread(self._publish, output)
        self._batch.error_file_id = await asyncio.to_thread(self._publish, errors)

    def _publish(self, file: StoredFile) -> str | None:
        """Publish a result file and return its id. An empty file is deleted instead."""
        path = self._files.data_path(file)
        if path.exists() and path.stat().st_size:
            return self._files.finish(file).id
        self._files.delete(file)
        return None
