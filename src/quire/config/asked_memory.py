"""Checks the caches that the user asked for against the machine's memory before a model is read."""

from __future__ import annotations

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.memory import PROCESS_BYTES
from quire.config.sizes import at_most, describe_shortage, format_size, parse_size
from quire.types.errors import DoesNotFit

_NO_MODEL = "the model not counted"


def check_asked_memory(args: EngineArguments, available: int, default_device: str) -> None:
    """Raise DoesNotFit if the KV cache and the host cache that the user asked for cannot fit, whatever the model.
    `available`: bytes of host memory. `default_device`: the one that "auto" names. What the model takes is known later:
    `MemoryPlan.check` then checks the whole plan, and a cache of `num_kv_blocks` too."""
    parsed, device = read_arguments(args), default_device if args.device == "auto" else args.device
    host_field = "host_cache_memory" if args.swap_space is None else "swap_space"
    host = parsed.tiers.host_blocks  # bytes until the tiers are resolved
    if device != "cpu":
        if host > available:
            reason = f"{format_size(host)} are asked for, {format_size(available)} are available"
            raise DoesNotFit(host_field, reason, _fix(available))
        return
    capacity, process = available // parsed.parallel.num_ranks, PROCESS_BYTES["cpu"]
    room = max(capacity - process, 0)
    cache = 0 if args.kv_cache_memory is None else parse_size("kv_cache_memory", args.kv_cache_memory)
    if cache > room:
        reason = f"{describe_shortage(process + cache, capacity, device)}, {_NO_MODEL}"
        raise DoesNotFit("kv_cache_memory", reason, _fix(room))
    if host > room - cache:
        reason = f"{describe_shortage(process + cache + host, capacity, device)}, {_NO_MODEL}"
        raise DoesNotFit(host_field, reason, _fix(room - cache))


def _fix(room: int) -> str:
    return f"lower it to less than {at_most(room)}" if room else "leave it out, and free memory"
