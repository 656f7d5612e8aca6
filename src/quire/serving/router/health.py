"""Health checks of the replicas, and queries for their models and the sizes of their caches."""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec

from quire.config.router import WaitConfig
from quire.serving.http.key_ring import CLIENT_HEADER
from quire.serving.router.connections import ReplicaFailed, RouterFull
from quire.serving.router.replica import Replica
from quire.serving.router.replica_set import ReplicaSet

logger = logging.getLogger("quire.router")

FAILURES_TO_DOWN = 2  # failed health checks in a row before a replica is marked down
LEARN_SECONDS = 10.0  # between two queries for models and cache size
_QUIRE_CACHE = re.compile(rb"^(?:quire|vllm):kv_cache_capacity_tokens(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_VLLM_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_MAX_COUNT = 2**53  # tokens or blocks; no cache holds so many


class HealthChecks:
    """Runs one health-check task for each replica, from when it is added until it is removed."""

    def __init__(self, replicas: ReplicaSet, waits: WaitConfig) -> None:
        self._replicas, self._waits = replicas, waits
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        for replica in self._replicas:
            self.watch(replica)

    def watch(self, replica: Replica) -> None:
        task = asyncio.get_running_loop().create_task(self._watch(replica), name=f"health {replica.name}")
        self._tasks[replica.name] = task

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        failures, learned_at = 0, float("-inf")
        loop = asyncio.get_running_loop()
        while self._replicas.get(replica.name) is replica:
            try:
                failure = await self.check(replica)
            except RouterFull as error:
                logger.warning("replica %s %s", replica.name, error.reason)
                await asyncio.sleep(self._waits.health_interval)
                continue
            if failure is None:
                failures = 0
                if not replica.is_up:  # maybe another process, with another model
                    learned_at = loop.time()
                    await self.learn(replica)
                if not replica.is_up or replica.checked_at is None:
                    logger.info("replica %s is up", replica.name)
                replica.mark_up()
                self._replicas.note_up()
                if loop.time() - learned_at > LEARN_SECONDS:
                    learned_at = loop.time()
                    await self.learn(replica)
                    self._replicas.note_up()  # some requests wait until `keeps_owners` is known
            else:
                failures += 1
                replica.counts.health_failures += 1
                if failure.has_ended or failures >= FAILURES_TO_DOWN:
                    if replica.is_up:
                        logger.warning("replica %s is down: it %s", replica.name, failure.reason)
                    replica.mark_down(failure.reason, has_ended=failure.has_ended)
            await asyncio.sleep(self._waits.health_interval)

    async def check(self, replica: Replica) -> ReplicaFailed | None:
        """Return why a replica is not healthy, or None if it is. Any status below 500 is healthy, so a
        server without /health is healthy if it answers. Raises RouterFull."""
        try:
            status, _, _ = await self._replicas.ask(replica, "GET", "/health", [], seconds=self._waits.health)
        except RouterFull:
            raise
        except ReplicaFailed as error:
            return error
        return ReplicaFailed(f"answered /health with {status}") if status >= 500 else None

    async def learn(self, replica: Replica) -> None:
        """Query a replica's models, its cache size, and whether it separates clients. A replica that does not report
        them is used with defaults."""
        try:
            status, headers, body = await self._replicas.ask(
                replica, "GET", "/v1/models", [], seconds=self._waits.health
            )
            if status < 500:  # else it is still loading
                replica.keeps_owners = any(name == CLIENT_HEADER for name, _ in headers)
            replica.models = model_names(body) if status == 200 else None
            status, _, body = await self._replicas.ask(replica, "GET", "/metrics", [], seconds=self._waits.health)
            replica.learn_cache(cache_tokens(body) if status == 200 else None)
        except ReplicaFailed as error:
            logger.debug("replica %s does not say what it serves: it %s", replica.name, error.reason)


def model_names(body: bytes) -> frozenset[str] | None:
    """Return the model names in a response of /v1/models, or None if it is invalid or empty."""
    try:
        listed = msgspec.json.decode(body)["data"]
        return frozenset(str(one["id"]) for one in listed) or None
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeError):
        return None


def cache_tokens(metrics: bytes) -> int | None:
    """Return the size of a replica's cache, in tokens, from its Prometheus metrics; None if it is missing or
    invalid."""
    if found := _QUIRE_CACHE.search(metrics):
        return _parse_count(found[1])
    if found := _VLLM_CACHE.search(metrics):
        labels = dict(re.findall(rb'(\w+)="([^"]*)"', found[1]))
        blocks, size = _parse_count(labels.get(b"num_gpu_blocks", b"")), _parse_count(labels.get(b"block_size", b""))
        if blocks is not None and size is not None:
            return blocks * size or None
    return None


def _parse_count(number: bytes) -> int | None:
    try:
        value = float(number)
    except ValueError:
        return None
    return int(value) if 0 <= value < _MAX_COUNT else None
