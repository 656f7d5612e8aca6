"""Ray Serve's choice of an engine, with stubs of Ray's classes. It needs no Ray."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire.serving.router.prompt_keys import read_prompt

NAMES = ("FIFOMixin", "PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router whose base classes are empty stubs."""
    stub = ModuleType("ray.serve.request_router")
    for name in NAMES:
        setattr(stub, name, type(name, (), {}))
    for name, module in (("ray", ModuleType("ray")), ("ray.serve", ModuleType("ray.serve")), (stub.__name__, stub)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "quire.serving.router.ray_router", raising=False)
    from quire.serving.router.ray_router import CacheAwareRouter

    made = CacheAwareRouter()
    made.initialize_state(cache_tokens=1_000_000)
    yield made
    sys.modules.pop("quire.serving.router.ray_router", None)


@pytest.mark.parametrize("header", [b"authorization", b"x-api-key", b"api-key"])
def test_clients_with_different_keys_do_not_count_on_each_others_cache(router: Any, header: bytes) -> None:
    replicas = [SimpleNamespace(replica_id=name) for name in ("a", "b")]
    body = json.dumps({"prompt": "the same long prompt " * 200}).encode()
    request = SimpleNamespace(args=[{"headers": [(header, b"one")], "body": body}])
    chosen = asyncio.run(router.choose_replicas(replicas, request))[0][0]
    known = router._known(chosen.replica_id)
    assert known.num_matched(read_prompt(body, {}, b"one")) > 0
    assert known.num_matched(read_prompt(body, {}, b"two")) == 0
