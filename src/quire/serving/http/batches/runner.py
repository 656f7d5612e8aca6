"""Runs batches in the background, and continues those that a stopped server or edge left unfinished."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.http.batches.batch_run import BatchFailed, BatchRun
from quire.serving.http.batches.batch_store import Batch, BatchStore
from quire.serving.http.batches.file_store import FileStore
from quire.serving.http.batches.gate import BackgroundGate
from quire.serving.http.exchange import AsgiHandler

RETRY_SECONDS = 10.0  # between two attempts to write what a full disk or too many open files refused
# Errors that may be over at the next attempt. With all others, such as a missing permission, attempts would never end.
PASSING = frozenset(
    {
        errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK,
        errno.ENOMEM, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT,
    }
)  # fmt: skip
logger = logging.getLogger("quire.edge")


class BatchRunner:
    """The files and batches of one edge. Without a `directory` they are kept in a temporary one, which is deleted with
    the edge.

    `targets` are the handlers of the endpoints that batches may call, by path.
    """

    def __init__(
        self, directory: Path | None, limits: Mapping[str, int], dispatcher: Dispatcher, num_edges: int = 1
    ) -> None:
        self._temporary = None if directory is not None else tempfile.TemporaryDirectory(prefix="quire-files-")
        root = Path(self._temporary.name) if self._temporary is not None else directory
        assert root is not None
        self.files, self.batches = FileStore(root / "files", limits), BatchStore(root / "batches", limits)
        self.targets: dict[str, AsgiHandler] = {}
        self._limits = limits
        self._gate = BackgroundGate(dispatcher, limits["batch_requests"], num_edges)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def resume(self) -> None:
        """Continue all unfinished batches that no other process runs."""
        for batch in self.batches.unfinished():
            self.launch(batch)

    def launch(self, batch: Batch) -> None:
        """Run a batch in the background, unless another edge runs it."""
        task = asyncio.ensure_future(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _run(self, batch: Batch) -> None:
        lock = None
        try:
            lock = await self._lock(batch)
            if lock is None:
                return
            handler = self.targets.get(batch.endpoint)
            if handler is None:
                raise BatchFailed(f"endpoint {batch.endpoint} is not served")
            await BatchRun(batch, self.files, self.batches, handler, self._gate, self._limits).run()
        except BatchFailed as error:
            await self._fail(batch, str(error))
        except OSError as error:
            logger.error("batch %s: %s", batch.id, error)
            await self._fail(batch, f"the server could not read or write its files: {os.strerror(error.errno or 0)}")
        except Exception:
            logger.exception("batch %s failed", batch.id)
            await self._fail(batch, "the server failed to run it; the cause is in its log")
        finally:
            if lock is not None:
                os.close(lock)

    async def _lock(self, batch: Batch) -> int | None:
        """Lock a batch for this process, as soon as a file can be opened. Returns None if another process runs it.
        Raises OSError if the file can never be opened."""
        while True:
            try:
                return await asyncio.to_thread(self.batches.lock, batch)
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                await self._wait_after(batch, error)

    async def _fail(self, batch: Batch, problem: str) -> None:
        """Store that a batch has failed, as soon as there is room on the disk. If it can never be stored, log that."""
        batch.problem = problem
        batch.enter("failed")
        while True:
            try:
                return await asyncio.to_thread(self.batches.save, batch)
            except OSError as error:
                if error.errno not in PASSING:
                    logger.error("batch %s: it cannot be stored that it failed: %s", batch.id, error)
                    return None
                await self._wait_after(batch, error)

    async def _wait_after(self, batch: Batch, error: OSError) -> None:
        logger.error("batch %s: %s; trying again in %d seconds", batch.id, error, RETRY_SECONDS)
        await asyncio.sleep(RETRY_SECONDS)
