"""`quire serve --replicas N`: N servers on private sockets, and the router on the public address."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import time
from dataclasses import replace
from pathlib import Path

import uvloop

from quire.config.keys import KeySources
from quire.config.router import ReplicaAddress, RouterConfig, WaitConfig
from quire.config.server import ServerConfig
from quire.observability.logging import set_up_logging
from quire.serving.process.announcing import Announcer
from quire.serving.process.backoff import Backoff
from quire.serving.process.listeners import Listeners, bound_connections, open_listeners
from quire.serving.process.model_files import check_memory, check_model, find_local_files, with_local_files
from quire.serving.process.private_directory import private_directory, write_admin_key
from quire.serving.process.supervisor import ServerFailed
from quire.serving.router.replica_configs import gpu_shares, replica_config, visible_gpus, with_router_key
from quire.serving.router.replica_keeper import KeptReplica, ReplicaKeeper
from quire.serving.router.server import Router
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.supervisor")


class ReplicatedServer:
    """Starts, monitors and stops the replicas, and runs the router in this process.

    A replica is a whole server: its own engine, HTTP processes and supervisor. It checks keys itself, so the router
    passes them on. `admin_key` is only printed as part of the playground's address.
    """

    def __init__(self, config: ServerConfig, *, keys: KeySources, admin_key: str | None = None) -> None:
        if config.listen.has_admin_listener:
            name = "admin_port" if config.listen.admin_port is not None else "admin_uds"
            raise ConfigError(
                name, "cannot be given together with replicas", "leave it out: /admin is on the port itself"
            )
        self._config, self._keys, self._admin_key = config, keys, admin_key
        self._announcer = Announcer()
        self._started_at = time.monotonic()

    def run(self) -> int:
        """Serve until a signal. Returns the exit code. Raises ConfigError or ModelLoadError before it starts a process,
        and ServerFailed if a replica cannot start."""
        set_up_logging(self._config.log_level, self._config.log_format, "router")
        self._config = replace(self._config, limits=bound_connections(self._config.limits, files_each=2))
        shares = gpu_shares(self._config, visible_gpus())
        check_memory(self._config)
        with open_listeners(replace(self._config, api_workers=1)) as listeners, private_directory() as directory:
            found = find_local_files(self._config, self._announcer.progress)
            if found is None:
                found = with_local_files(self._config, offline=False, progress=self._announcer.progress)
            self._announcer.end_progress()
            check_model(found)
            self._config = found
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(self._serve(listeners, directory, shares))

    async def _serve(self, listeners: Listeners, directory: Path, shares: list[dict[str, str]]) -> int:
        configs = [replica_config(self._config, place, directory) for place in range(self._config.replicas)]
        own_key = secrets.token_urlsafe(24) if self._config.access.key_digests else None
        keys = replace(self._keys, made_admin_key=None)
        if own_key is not None:
            keys, configs = with_router_key(keys, configs, own_key)
        router = Router(self._router_config(configs, own_key))
        kept = []
        for replica, config, share in zip(router.replicas, configs, shares, strict=True):
            replica.is_up = False  # until its first successful health check
            kept.append(KeptReplica(replica, config, share, Backoff(config.max_restart_delay)))
        keeper = ReplicaKeeper(kept, keys)
        key_file = write_admin_key(directory, self._keys.made_admin_key, self._admin_key)
        try:
            return await self._supervise(router, keeper, listeners, key_file)
        finally:
            keeper.kill()

    def _router_config(self, configs: list[ServerConfig], own_key: str | None) -> RouterConfig:
        config = self._config
        return RouterConfig(
            replicas=tuple(
                ReplicaAddress(name=f"replica-{place}", socket=one.listen.uds) for place, one in enumerate(configs)
            ),
            host=config.host,
            port=config.port,
            listen=config.listen,
            access=config.access,
            checks_keys=False,
            own_key=own_key,
            waits=WaitConfig(drain=config.drain_seconds),
            limits=config.limits,
        )

    async def _supervise(
        self, router: Router, keeper: ReplicaKeeper, listeners: Listeners, key_file: str | None
    ) -> int:
        signals: list[signal.Signals] = []
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.append, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload, router, keeper)
        keeping = loop.create_task(keeper.run())
        is_announced = False
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(router.running(listeners.api[0]))
            while not signals:
                if keeping.done():
                    keeping.result()
                if keeper.failure is not None:
                    self._announcer.end_progress()
                    raise ServerFailed(keeper.failure)
                if not is_announced:
                    is_announced = self._announce(router, keeper, listeners, key_file)
                await asyncio.sleep(0.05)
            seconds = self._config.drain_seconds
            logger.info("stopping (%s): requests in flight have %g s to finish", signals[0].name, seconds)
            closing = asyncio.ensure_future(stack.aclose())
            while not closing.done() and len(signals) < 2:
                await asyncio.wait((closing,), timeout=0.05)
        keeping.cancel()
        stopping = asyncio.ensure_future(keeper.stop(self._config.drain_seconds))
        while not stopping.done() and len(signals) < 2:
            await asyncio.wait((stopping,), timeout=0.05)
        if len(signals) > 1:
            logger.warning("forced to stop by a second signal")
            return 128 + signals[1]
        return 0

    def _announce(self, router: Router, keeper: ReplicaKeeper, listeners: Listeners, key_file: str | None) -> bool:
        """Print the loading progress, or that all replicas are up. Returns whether they are."""
        if not keeper.all_were_ready or not all(replica.is_up for replica in router.replicas):
            if keeper.phase:
                self._announcer.progress(keeper.phase, 0, 100)
            return False
        gc.collect()
        gc.freeze()
        name = self._config.source.served_names[0]
        playground = f"{listeners.admin_url}/#admin={self._admin_key}" if self._admin_key is not None else None
        self._announcer.ready(name, listeners.url, time.monotonic() - self._started_at, playground, key_file)
        return True

    def _reload(self, router: Router, keeper: ReplicaKeeper) -> None:
        """Handle SIGHUP: reload the keys in the router and in all replicas, and the router's certificate."""
        if router.reload(self._keys):
            keeper.signal(signal.SIGHUP)
