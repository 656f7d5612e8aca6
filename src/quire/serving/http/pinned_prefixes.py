"""Pins the prompts that operators register: computes them once for each owner, and again when a new engine is up."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.engine.kvcache.pinned_prefixes import check_share
from quire.serving.dispatch.dispatcher import Dispatcher, QueueFull
from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.http.errors import ApiError, as_failure, as_refusal, engine_unavailable
from quire.serving.http.key_ring import KeyRing
from quire.serving.http.pinned_prefix_file import PinnedPrefixEntry, PinnedPrefixFile
from quire.serving.http.request_head import cache_salt
from quire.serving.process.link import EngineLink
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.prefix import PinnedPrefix
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams

logger = logging.getLogger("quire.edge")

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before missing prefixes are computed again; doubled each time
Place = tuple[str, str]  # name and salt: the engine has at most one pinned prefix for each


@dataclass(frozen=True, slots=True)
class PinnedPrefixRow:
    """One pinned prompt of one owner, as listed to operators. `key` is the beginning of the key's digest: it tells keys
    apart but grants no access."""

    name: str
    key: str | None
    num_tokens: int
    num_blocks: int
    resident: bool


class PinnedPrefixes:
    """Pins prompts by submitting ordinary requests for one token with `pin` set, so that the engine keeps their blocks.
    Prompts that are in the file but not in the engine are computed again until they are.

    The event loop calls all methods. Changes of the file by this edge run one at a time; other edges may change it at
    any time.
    """

    def __init__(self, dispatcher: Dispatcher, link: EngineLink, access: KeyRing, file: PinnedPrefixFile) -> None:
        self._dispatcher, self._link, self._access, self._file = dispatcher, link, access, file
        self._changing = asyncio.Lock()
        self._recalling: asyncio.Task[None] | None = None

    def owners(self, api_key: str | None) -> tuple[str, ...]:
        """Return the owners to pin a prompt for: those of one API key, or all client keys of the server. Raises
        InvalidRequest if the key cannot occur, or if it is missing and only routers know the clients' keys."""
        access = self._access
        if api_key is None:
            if access.shares_cache or not access.asks_for_key:
                return ("",)
            if not access.client_digests:
                reason = "is needed: all keys of this server belong to routers, so it does not know its clients' keys"
                raise InvalidRequest("api_key", reason, "send the key of a client, or set --shared-prefix-cache")
            return access.client_digests
        owners = access.owners_of(api_key)
        if not owners:
            raise InvalidRequest(
                "api_key", "is not a key of this server", "send one of its keys, or leave it out for all"
            )
        return ("",) if access.shares_cache else owners

    async def register(self, name: str, token_ids: tuple[int, ...], owners: Sequence[str]) -> list[PinnedPrefix]:
        """Compute and pin a prompt for each owner; on failure, undo it. Raises ApiError or InvalidRequest."""
        wanted, done = [PinnedPrefixEntry(name, owner, token_ids) for owner in owners], list[PinnedPrefixEntry]()
        async with self._changing:
            try:
                await self._check_room(wanted)
                for entry in wanted:  # one by one: the blocks of a replaced prompt make room for the next
                    if (refused := await self._pin([entry])) is not None:
                        raise refused
                    done.append(entry)
                held = await self._pinned()
                if any(self._place(entry) not in held for entry in wanted):
                    reason = "the cache was reset, or shared blocks were unpinned meanwhile; register the prompt again"
                    raise ApiError(409, reason, code="cache_reset", param="name")
            except QuireError as error:
                await self._undo(done)
                if isinstance(error, EngineDead):
                    raise engine_unavailable("the engine is down or does not answer") from None
                raise
            self._file.add(wanted)
        return [held[self._place(entry)] for entry in wanted]

    async def listing(self) -> list[PinnedPrefixRow]:
        """Return all entries of the file, and whether the engine has them pinned now."""
        try:
            held = await self._pinned()
        except EngineDead:
            held = {}
        rows = []
        for entry in self._file.entries():
            pinned = held.get(self._place(entry))
            blocks = 0 if pinned is None else pinned.num_blocks
            key = entry.owner[:8] or None
            rows.append(PinnedPrefixRow(entry.name, key, len(entry.token_ids), blocks, pinned is not None))
        return rows

    async def remove(self, name: str) -> int:
        """Unpin a prompt for all owners and return for how many. Its blocks stay cached until they are evicted."""
        async with self._changing:
            found = [entry for entry in self._file.entries() if entry.name == name]
            self._file.remove(name)
            for entry in found:
                await self._unpin(entry)
        return len(found)

    async def reset_cache(self) -> int:
        """Clear the prefix cache of the engine, including pinned prompts. Returns how many blocks were freed. Raises
        EngineDead."""
        self._file.clear()  # so that prompts that are just being pinned again are unpinned
        async with self._changing:
            self._file.clear()  # again, for prompts that were registered meanwhile
            return await self._link.reset_cache()

    def recall(self) -> None:
        """Pin all entries of the file again. Called when a new engine is up. These requests go to the head of the
        queue."""
        self._start_recall(self._file.entries())

    # ------------------------------------------------------------------------------------------------- internals
    def _start_recall(self, lost: Sequence[PinnedPrefixEntry]) -> None:
        """Start pinning these prefixes again, in place of a running task that does so."""
        if lost:
            if self._recalling is not None:
                self._recalling.cancel()
            self._recalling = asyncio.ensure_future(self._recall(lost))

    async def _recall(self, lost: Sequence[PinnedPrefixEntry]) -> None:
        """Pin prefixes until none is missing or the engine is down. The next engine then gets all of them."""
        pause = _PAUSE
        while lost and self._dispatcher.engine is not None and not self._dispatcher.is_draining:
            async with self._changing:
                await self._pin_again(lost)
            try:
                held = await self._pinned()
                lost = [entry for entry in self._file.entries() if self._place(entry) not in held]
            except EngineDead:
                lost = self._file.entries()
            if lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _pin_again(self, lost: Sequence[PinnedPrefixEntry]) -> None:
        """Pin prefixes, except those that an edge has removed or replaced meanwhile."""
        known = self._file.entries()
        lost = [entry for entry in lost if entry in known]
        try:
            if (refused := await self._pin(lost)) is not None:
                raise refused
        except QuireError as error:
            names = ", ".join(dict.fromkeys(entry.name for entry in lost))
            logger.error("not all of these prefixes could be pinned: %s; they are tried again: %s", names, error)
        known = self._file.entries()
        for entry in lost:
            if entry not in known:
                await self._unpin(entry)

    async def _check_room(self, wanted: Sequence[PinnedPrefixEntry]) -> None:
        """Raise InvalidRequest, before anything is computed, if the cache cannot hold all these prompts."""
        engine = self._dispatcher.known_engine
        assert engine is not None, "prefixes are registered with an engine that was up"
        stats, held, known = await self._link.stats(), await self._pinned(), self._file.entries()
        reserved = stats.blocks.pinned
        for entry in wanted:
            old = held.get(self._place(entry))
            if old is not None and entry in known:
                continue
            own = -(-len(entry.token_ids) // engine.block_size)
            check_share(own, reserved, stats.blocks.total)
            reserved += own - (0 if old is None else old.num_blocks)

    async def _pin(self, wanted: Sequence[PinnedPrefixEntry]) -> ApiError | None:
        """Have the engine compute and pin these prompts. Returns an error if it did not pin all of them."""
        requests = [self._request(entry) for entry in wanted]
        try:
            with self._dispatcher.accept():
                try:
                    refused = self._enqueue(requests)
                    for request in requests:
                        while request.state != "new" and not request.mailbox.is_over:
                            await request.mailbox.wait()
                finally:
                    self._dispatcher.cancel(requests)
        except QuireError as error:
            raise as_refusal(error) from None
        failures = (request.mailbox.failure for request in requests)
        return refused or next((as_failure(failure) for failure in failures if failure is not None), None)

    def _enqueue(self, requests: Sequence[InFlightRequest]) -> ApiError | None:
        """Queue all requests together or, if the queue is too full, as many as fit. Returns an error if that is not
        all."""
        with suppress(QueueFull):
            self._dispatcher.enqueue(requests)
            return None
        try:
            for request in requests:
                self._dispatcher.enqueue([request])
        except QueueFull as error:
            return as_refusal(error)
        return None

    def _request(self, entry: PinnedPrefixEntry) -> InFlightRequest:
        salt, number = self._salt(entry.owner), secrets.token_hex(8)
        submit = Submit(f"prefix-{number}", pack_tokens(entry.token_ids), _ONE_TOKEN, cache_salt=salt, pin=entry.name)
        record = RequestRecord(
            submit.request_id,
            "prefix",
            len(submit.prompt_token_ids),
            submit.sampling,
            streamed=False,
            received_at=time.monotonic(),
            name=submit.request_id,
        )
        return InFlightRequest(submit, record, Mailbox(asyncio.get_running_loop(), 1))

    async def _undo(self, done: Sequence[PinnedPrefixEntry]) -> None:
        """Undo a failed registration: unpin its prompts, and pin those again that they replaced."""
        for entry in done:
            await self._unpin(entry)
        places = {self._place(entry) for entry in done}
        self._start_recall([entry for entry in self._file.entries() if self._place(entry) in places])

    async def _pinned(self) -> dict[Place, PinnedPrefix]:
        """Return the prefixes that the engine has pinned. Raises EngineDead."""
        return {(pinned.name, pinned.salt): pinned for pinned in await self._link.pins()}

    async def _unpin(self, entry: PinnedPrefixEntry) -> None:
        """Unpin a prompt in the engine, if that is up."""
        try:
            await self._link.unpin(self._salt(entry.owner), entry.name)
        except EngineDead:
            logger.info("prefix %s is not pinned any more: its engine died", entry.name)

    def _place(self, entry: PinnedPrefixEntry) -> Place:
        return entry.name, self._salt(entry.owner)

    def _salt(self, owner: str) -> str:
        return cache_salt(owner, "", is_shared=self._access.shares_cache)
