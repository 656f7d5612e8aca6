"""The router's choice of a replica as a Ray Serve request router: the longest expected match, under a load bound."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.config.router import BalanceConfig, ReplicaAddress
from quire.serving.http.key_ring import raw_key
from quire.serving.router.choice import Chooser
from quire.serving.router.prompt_keys import Prompt, read_prompt
from quire.serving.router.replica import Replica


class CacheAwareRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Ranks the replica that `Chooser` chooses first and all others after it, by load. Ray Serve tries them if the
    first one has reached its request limit. Requests are dicts with `headers` and `body`."""

    def initialize_state(self, cache_tokens: int | None = None) -> None:
        """Initialize the state. Ray Serve calls this with `request_router_kwargs`."""
        self._balance = BalanceConfig(cache_tokens=cache_tokens)
        self._chooser = Chooser(self._balance)
        self._trees: dict[str, Replica] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        known = [self._known(one.replica_id) for one in candidate_replicas]
        choice = self._chooser.choose(known, _prompt_of(pending_request))
        first = candidate_replicas[known.index(choice.replica)]
        others = sorted((one for one in candidate_replicas if one is not first), key=self._load)
        return [[first], *([one] for one in others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002 - Ray's signature
        self._known(replica_id).load += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002 - Ray's
        known = self._known(replica_id)
        known.load = max(0, known.load - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        here = {str(one.replica_id) for one in replicas}
        self._trees = {name: tree for name, tree in self._trees.items() if name in here}

    def _known(self, replica_id: ReplicaID) -> Replica:
        name = str(replica_id)
        if name not in self._trees:
            self._trees[name] = Replica(ReplicaAddress(name=name), self._balance)
        return self._trees[name]

    def _load(self, replica: RunningReplica) -> int:
        return self._known(replica.replica_id).load


def _prompt_of(pending: PendingRequest | None) -> Prompt:
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, dict):
        return Prompt()
    headers = dict(request["headers"])
    return read_prompt(request["body"], headers, raw_key(headers))
