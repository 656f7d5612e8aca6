"""Runs the lines of one batch and writes their results as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import BinaryIO

import msgspec

from quire.serving.batch_lines import (
    BatchLine,
    answered_keys,
    custom_id_of,
    error_key,
    error_line,
    read_line,
    read_lines,
    result_line,
)
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.http.batches.batch_store import Batch, BatchStore
from quire.serving.http.batches.file_store import FileStore, StoredFile, epoch_seconds
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import AsgiHandler
from quire.serving.http.inner_call import InnerResponse, call_endpoint
from quire.types.errors import InvalidRequest, QuireError

POLL_SECONDS = 0.05  # between two looks for spare capacity
WATCH_SECONDS = 0.25  # between two looks whether the batch was cancelled
SAVE_SECONDS = 0.5  # between two writes of a batch's counts, at least
MAX_TRIES = 5  # of a line during which the engine went down
BACKGROUND_PRIORITY = 1_000_000  # where the engine knows priorities: behind everybody


class BatchFailed(QuireError):
    """The batch cannot be run. The text is written for its owner."""


class BackgroundGate:
    """Lets requests of batches through while the server has capacity to spare: no other request waits, and batches
    use at most half of the sequences that the engine can run."""

    def __init__(self, dispatcher: Dispatcher, max_requests: int, num_edges: int) -> None:
        self._dispatcher, self._max_requests, self._num_edges = dispatcher, max_requests, num_edges
        self._num_running = 0

    async def enter(self) -> bool:
        """Wait for capacity. Returns False if the server shuts down first; after True, call `leave`."""
        while not self._has_room():
            if self._dispatcher.is_draining:
                return False
            await asyncio.sleep(POLL_SECONDS)
        self._num_running += 1
        return True

    def leave(self) -> None:
        self._num_running -= 1

    def _has_room(self) -> bool:
        engine, dispatcher = self._dispatcher.engine, self._dispatcher
        if engine is None or dispatcher.is_draining:
            return False
        share = max(1, engine.max_num_seqs // (2 * self._num_edges))
        if self._num_running >= min(self._max_requests, share):
            return False
        return dispatcher.num_waiting == 0 and dispatcher.edge_loads.elsewhere()[0] == 0

    @property
    def knows_priorities(self) -> bool:
        engine = self._dispatcher.known_engine
        return engine is not None and engine.policy == "priority"

    @property
    def is_closed(self) -> bool:
        return self._dispatcher.is_draining


class BatchRun:
    """One run of one batch, from where the last one stopped. Every finished line is in a file before the next begins.

    A line that is wrong or fails gets a line of its own in the error file; the others go on.
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
        self._num_bytes = 0
        self._stopped_by: str | None = None  # the state that ended the run early

    async def run(self) -> None:
        """Run the batch until it ends, or until the server shuts down. Raises BatchFailed."""
        batch = self._batch
        source = await self._input()
        output, errors = await asyncio.to_thread(self._outputs)
        answered = await asyncio.to_thread(answered_keys, self._files.data_path(output), keeps_failures=True)
        refused = await asyncio.to_thread(answered_keys, self._files.data_path(errors), keeps_failures=True)
        batch.completed, batch.failed, self._done = len(answered), len(refused), answered | refused
        batch.enter("in_progress")
        await self._save()
        with ExitStack() as stack:
            self._lines = read_lines(
                stack.enter_context(self._files.data_path(source).open("rb")), self._limits["body_bytes"] + 4_096
            )
            self._output = stack.enter_context(self._files.data_path(output).open("ab"))
            self._errors = stack.enter_context(self._files.data_path(errors).open("ab"))
            try:
                await self._work()
            except BatchFailed:
                await self._publish_results(output, errors)
                raise
            if self._gate.is_closed and self._stopped_by is None and batch.completed + batch.failed < batch.total:
                await self._save()
                return  # the next start goes on from here
        await self._finalize(output, errors)

    async def _input(self) -> StoredFile:
        batch = self._batch
        try:
            source = await asyncio.to_thread(self._files.get, batch.owner, batch.input_file_id)
        except ApiError:
            raise BatchFailed("the input file is gone") from None
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
        """The two files that the batch writes; those of its last run, if it had one."""
        batch, purpose = self._batch, "batch_output"
        names = (f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl")
        if not batch.reserved:
            batch.reserved = [self._files.begin(batch.owner, name, purpose).id for name in names]
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
        for number, text in self._lines:
            if error_key(number) in self._done:
                continue
            if not await self._answer(number, text):
                return

    async def _answer(self, number: int, text: bytes | None) -> bool:
        """Run one line and write its result. Returns False if the server shuts down before it has one."""
        try:
            if text is None:
                raise InvalidRequest(f"line {number}", f"is above {self._limits['body_bytes']} bytes", "split it")
            line = await asyncio.to_thread(read_line, number, text, (self._batch.endpoint,))
            if line.custom_id in self._seen:
                raise InvalidRequest(f"line {number}: custom_id", "is that of another line", "choose another")
        except InvalidRequest as error:
            name = None if text is None else custom_id_of(text)
            await self._write(self._errors, error_line(name, "invalid_line", str(error), number), is_failure=True)
            return True
        self._seen.add(line.custom_id)
        if line.custom_id in self._done:
            return True
        response = await self._send(line)
        if response is None:
            return False
        failed = response.status != 200
        made = result_line(line.custom_id, response.request_id, response.status, response.body)
        await self._write(self._errors if failed else self._output, made, is_failure=failed)
        return True

    async def _send(self, line: BatchLine) -> InnerResponse | None:
        """Send a line to its endpoint, again where the server was full or its engine went down. None: it shuts
        down."""
        body = {"priority": BACKGROUND_PRIORITY, **line.body} if self._gate.knows_priorities else line.body
        encoded, num_tries = msgspec.json.encode(body), 0
        while await self._gate.enter():
            try:
                response = await call_endpoint(self._handler, line.url, encoded, self._batch.owner)
            finally:
                self._gate.leave()
            num_tries += response.status == 503
            if response.status not in (429, 503) or num_tries >= MAX_TRIES:
                return response
            await asyncio.sleep(response.retry_after)
        return None

    async def _write(self, file: BinaryIO, line: bytes, *, is_failure: bool) -> None:
        file.write(line)
        file.flush()
        self._num_bytes += len(line)
        if self._num_bytes > self._limits["files_bytes"]:
            raise BatchFailed(f"its results have more than {self._limits['files_bytes']} bytes")
        self._batch.failed += is_failure
        self._batch.completed += not is_failure
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            await self._save()

    async def _save(self) -> None:
        self._saved_at = time.monotonic()
        await asyncio.to_thread(self._batches.save, self._batch)

    async def _finalize(self, output: StoredFile, errors: StoredFile) -> None:
        """Make the results known, and the batch's end."""
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
        with suppress(FileNotFoundError):
            if self._files.data_path(file).stat().st_size:
                return self._files.finish(file).id
            self._files.delete(file)
        return None
