"""Prompts that the operator wants resident: computed once for each tenant, and again after the engine was restarted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.server import AccessConfig
from quire.serving.desk.desk import Desk
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
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

logger = logging.getLogger("quire.edge")

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """One prompt of one tenant as operators see it. `key` tells keys apart and opens nothing."""

    name: str
    key: str | None
    num_tokens: int
    num_blocks: int
    resident: bool


class Residents:
    """Registers prompts through the desk as ordinary requests of one token, whose prompts the engine then holds.

    Belongs to the event loop.
    """

    def __init__(self, desk: Desk, link: EngineLink, access: AccessConfig, book: PrefixBook) -> None:
        self._desk, self._link, self._access, self._book = desk, link, access, book
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
        """Compute and hold a prompt for each of the owners, or for none. Raises ApiError or InvalidRequest."""
        done: list[PinnedPrefix] = []
        try:
            for owner in owners:
                done.append(await self._hold(BookedPrefix(name, owner, token_ids)))
        except QuireError:
            for pinned in done:
                await self._let_go(pinned.salt, name)
            raise
        self._book.add([BookedPrefix(name, owner, token_ids) for owner in owners])
        return done

    async def listing(self) -> list[ResidentRow]:
        """All that is written down, and whether the engine holds it now."""
        try:
            held = {(pinned.name, pinned.salt): pinned for pinned in await self._link.pins()}
        except EngineDead:
            held = {}
        rows = []
        for booked in self._book.entries():
            pinned = held.get((booked.name, self._salt(booked.owner)))
            blocks = 0 if pinned is None else pinned.num_blocks
            key = booked.owner[:8] or None
            rows.append(ResidentRow(booked.name, key, len(booked.token_ids), blocks, pinned is not None))
        return rows

    async def remove(self, name: str) -> int:
        """Forget a prompt, for all owners; returns for how many. It stays cached as others do."""
        found = [booked for booked in self._book.entries() if booked.name == name]
        for booked in found:
            await self._let_go(self._salt(booked.owner), name)
        self._book.remove(name)
        return len(found)

    def forget(self) -> None:
        """The cache was reset: nothing is resident, and nothing is to be recalled."""
        self._book.clear()

    def recall(self) -> None:
        """A new engine is up: compute again what it does not hold."""
        if self._book.entries():
            self._recalling = asyncio.ensure_future(self._recall())

    async def _recall(self) -> None:
        try:
            held = {(pinned.name, pinned.salt) for pinned in await self._link.pins()}
        except EngineDead:
            return
        for booked in self._book.entries():
            if (booked.name, self._salt(booked.owner)) in held:
                continue
            try:
                await self._hold(booked)
            except QuireError as error:
                logger.error("prefix %s is not resident in the new engine: %s", booked.name, error)

    async def _hold(self, booked: BookedPrefix) -> PinnedPrefix:
        salt, number = self._salt(booked.owner), secrets.token_hex(8)
        submit = Submit(f"prefix-{number}", booked.token_ids, _ONE_TOKEN, cache_salt=salt, pin=booked.name)
        await self._compute(submit)
        try:
            pins = await self._link.pins()
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None
        for pinned in pins:
            if (pinned.name, pinned.salt) == (booked.name, salt):
                return pinned
        raise ApiError(409, "the cache was reset meanwhile; register it again", code="cache_reset", param="name")

    async def _compute(self, submit: Submit) -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), 1)
        record = RequestRecord(
            submit.request_id,
            "prefix",
            len(submit.prompt_token_ids),
            submit.sampling,
            streamed=False,
            received_at=time.monotonic(),
            name=submit.request_id,
        )
        ticket = Ticket(submit, record, mailbox)
        try:
            with self._desk.visit():
                self._desk.enter([ticket])
                try:
                    while not mailbox.is_over:
                        await mailbox.wait()
                finally:
                    self._desk.leave([ticket])
        except QuireError as error:
            raise as_refusal(error) from None
        if mailbox.failure is not None:
            raise as_failure(mailbox.failure)

    async def _let_go(self, salt: str, name: str) -> None:
        try:
            await self._link.unpin(salt, name)
        except EngineDead:
            logger.info("prefix %s went with its engine", name)

    def _salt(self, owner: str) -> str:
        return cache_salt(owner, "", is_shared=self._access.shares_cache)
