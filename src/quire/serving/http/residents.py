"""Prompts that the operator wants resident: computed once for each tenant, and again after the engine was restarted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.config.server import AccessConfig
from quire.engine.kvcache.pinned_prefixes import check_share
from quire.serving.desk.desk import Desk, QueueFull
from quire.serving.desk.mailbox import Mailbox
from quire.serving.desk.observer import RequestRecord
from quire.serving.desk.prefix_book import BookedPrefix, PrefixBook
from quire.serving.desk.ticket import Ticket
from quire.serving.http.errors import ApiError, engine_unavailable
from quire.serving.http.openai.failures import as_failure, as_refusal
from quire.serving.http.salts import cache_salt
from quire.serving.process.link import EngineLink
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.prefix import PinnedPrefix
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams

logger = logging.getLogger("quire.edge")

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before what is not resident is tried again; it doubles
Place = tuple[str, str]  # name and salt


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """One prompt of one tenant as operators see it. `key` tells keys apart and opens nothing."""

    name: str
    key: str | None
    num_tokens: int
    num_blocks: int
    resident: bool


class Residents:
    """Registers prompts through the desk as ordinary requests of one token, whose prompts the engine then holds. What
    is written down and not held is computed again until it is.

    Belongs to the event loop. The book is changed by one call at a time; another edge may change it at any time.
    """

    def __init__(self, desk: Desk, link: EngineLink, access: AccessConfig, book: PrefixBook) -> None:
        self._desk, self._link, self._access, self._book = desk, link, access, book
        self._changing = asyncio.Lock()
        self._recalling: asyncio.Task[None] | None = None

    def owners(self, api_key: str | None) -> tuple[str, ...]:
        """Whose clients are to find a prompt: those of one key, or of all. Raises InvalidRequest for a strange key."""
        if api_key is None:
            return self._access.key_digests if self._access.key_digests and not self._access.shares_cache else ("",)
        digest = hashlib.sha256(api_key.encode()).hexdigest()
        if digest not in self._access.key_digests:
            raise InvalidRequest("api_key", "is no key of this server", "send one of its keys, or none for all")
        return ("",) if self._access.shares_cache else (digest,)

    async def register(self, name: str, token_ids: tuple[int, ...], owners: Sequence[str]) -> list[PinnedPrefix]:
        """Compute and hold a prompt for each of the owners, or leave everything as it was. Raises ApiError or
        InvalidRequest."""
        wanted, done = [BookedPrefix(name, owner, token_ids) for owner in owners], list[BookedPrefix]()
        async with self._changing:
            try:
                await self._check_room(wanted)
                for booked in wanted:  # one by one: what a new prompt replaces makes room for the next
                    if (refused := await self._hold([booked])) is not None:
                        raise refused
                    done.append(booked)
                held = await self._held()
                if any(self._place(booked) not in held for booked in wanted):
                    reason = "the cache was reset, or what the prompt shared was let go of meanwhile; register it again"
                    raise ApiError(409, reason, code="cache_reset", param="name")
            except QuireError as error:
                await self._take_back(done)
                if isinstance(error, EngineDead):
                    raise engine_unavailable("the engine is down or does not answer") from None
                raise
            self._book.add(wanted)
        return [held[self._place(booked)] for booked in wanted]

    async def listing(self) -> list[ResidentRow]:
        """All that is written down, and whether the engine holds it now."""
        try:
            held = await self._held()
        except EngineDead:
            held = {}
        rows = []
        for booked in self._book.entries():
            pinned = held.get(self._place(booked))
            blocks = 0 if pinned is None else pinned.num_blocks
            key = booked.owner[:8] or None
            rows.append(ResidentRow(booked.name, key, len(booked.token_ids), blocks, pinned is not None))
        return rows

    async def remove(self, name: str) -> int:
        """Forget a prompt, for all owners; returns for how many. It stays cached as others do."""
        async with self._changing:
            found = [booked for booked in self._book.entries() if booked.name == name]
            self._book.remove(name)
            for booked in found:
                await self._let_go(booked)
        return len(found)

    async def reset_cache(self) -> int:
        """Have the engine forget all cached prompts: none is resident then, and none is to be recalled. Returns how
        many blocks that freed. Raises EngineDead."""
        self._book.clear()  # what a new engine computes again is let go of at once
        async with self._changing:
            self._book.clear()  # what was registered meanwhile
            return await self._link.reset_cache()

    def recall(self) -> None:
        """A new engine is up, which holds nothing: compute again what is written down. It goes before what waits."""
        self._restore(self._book.entries())

    # ------------------------------------------------------------------------------------------------- the works
    def _restore(self, lost: Sequence[BookedPrefix]) -> None:
        if lost:
            if self._recalling is not None:
                self._recalling.cancel()
            self._recalling = asyncio.ensure_future(self._recall(lost))

    async def _recall(self, lost: Sequence[BookedPrefix]) -> None:
        """Until nothing is missing, or the engine is: the next one is told of everything."""
        pause = _PAUSE
        while lost and self._desk.engine is not None and not self._desk.is_draining:
            async with self._changing:
                await self._hold_again(lost)
            try:
                held = await self._held()
                lost = [booked for booked in self._book.entries() if self._place(booked) not in held]
            except EngineDead:
                lost = self._book.entries()
            if lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _hold_again(self, lost: Sequence[BookedPrefix]) -> None:
        """What was removed or replaced meanwhile, at this edge or another, is not held."""
        known = self._book.entries()
        lost = [booked for booked in lost if booked in known]
        try:
            if (refused := await self._hold(lost)) is not None:
                raise refused
        except QuireError as error:
            names = ", ".join(dict.fromkeys(booked.name for booked in lost))
            logger.error("not all of these prefixes are resident: %s; they are tried again: %s", names, error)
        known = self._book.entries()
        for booked in lost:
            if booked not in known:
                await self._let_go(booked)

    async def _check_room(self, wanted: Sequence[BookedPrefix]) -> None:
        """Raise InvalidRequest, before anything is computed, if not all of it can be held."""
        engine = self._desk.known_engine
        assert engine is not None, "prefixes are registered with an engine that was up"
        stats, held, known = await self._link.stats(), await self._held(), self._book.entries()
        reserved = stats.blocks.pinned
        for booked in wanted:
            old = held.get(self._place(booked))
            if old is not None and booked in known:
                continue
            own = -(-len(booked.token_ids) // engine.block_size)
            check_share(own, reserved, stats.blocks.total)
            reserved += own - (0 if old is None else old.num_blocks)

    async def _hold(self, wanted: Sequence[BookedPrefix]) -> ApiError | None:
        """Have prompts computed and held, all at once; returns why one of them is not."""
        tickets = [self._ticket(booked) for booked in wanted]
        try:
            with self._desk.visit():
                try:
                    refused = self._enter(tickets)
                    for ticket in tickets:
                        while ticket.state != "new" and not ticket.mailbox.is_over:
                            await ticket.mailbox.wait()
                finally:
                    self._desk.leave(tickets)
        except QuireError as error:
            raise as_refusal(error) from None
        failures = (ticket.mailbox.failure for ticket in tickets)
        return refused or next((as_failure(failure) for failure in failures if failure is not None), None)

    def _enter(self, tickets: Sequence[Ticket]) -> ApiError | None:
        """All at once, so that none stands behind what waits; else as many as there is room for, and why not all."""
        with suppress(QueueFull):
            self._desk.enter(tickets)
            return None
        try:
            for ticket in tickets:
                self._desk.enter([ticket])
        except QueueFull as error:
            return as_refusal(error)
        return None

    def _ticket(self, booked: BookedPrefix) -> Ticket:
        salt, number = self._salt(booked.owner), secrets.token_hex(8)
        submit = Submit(f"prefix-{number}", pack_tokens(booked.token_ids), _ONE_TOKEN, cache_salt=salt, pin=booked.name)
        record = RequestRecord(
            submit.request_id,
            "prefix",
            len(submit.prompt_token_ids),
            submit.sampling,
            streamed=False,
            received_at=time.monotonic(),
            name=submit.request_id,
        )
        return Ticket(submit, record, Mailbox(asyncio.get_running_loop(), 1))

    async def _take_back(self, done: Sequence[BookedPrefix]) -> None:
        """What was computed for a registration that came to nothing is let go, and what it replaced comes back."""
        for booked in done:
            await self._let_go(booked)
        places = {self._place(booked) for booked in done}
        self._restore([booked for booked in self._book.entries() if self._place(booked) in places])

    async def _held(self) -> dict[Place, PinnedPrefix]:
        return {(pinned.name, pinned.salt): pinned for pinned in await self._link.pins()}

    async def _let_go(self, booked: BookedPrefix) -> None:
        try:
            await self._link.unpin(self._salt(booked.owner), booked.name)
        except EngineDead:
            logger.info("prefix %s went with its engine", booked.name)

    def _place(self, booked: BookedPrefix) -> Place:
        return booked.name, self._salt(booked.owner)

    def _salt(self, owner: str) -> str:
        return cache_salt(owner, "", is_shared=self._access.shares_cache)
