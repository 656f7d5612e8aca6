"""Whether somebody is about to compute what a waiting group would compute as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine.decoding.group import Group


def is_under_way(group: Group, computing: Iterable[Group], num_cached: Callable[[], int], block_size: int) -> bool:
    """Whether one of the groups that compute their prompts now has the block that `group` would compute first: it waits
    for that, and finds it in the prefix cache a step later.

    `num_cached` says how much of its prompt is there already; it is asked only if a group begins alike.
    """
    prompt, salt = group.request.prompt_token_ids, group.request.cache_salt
    cached: int | None = None
    for other in computing:
        theirs = other.request.prompt_token_ids
        if other is group or other.request.cache_salt != salt or theirs[:block_size] != prompt[:block_size]:
            continue
        cached = num_cached() if cached is None else cached
        stop = cached - cached % block_size + block_size  # of the first block that is missing
        if stop < len(prompt) and theirs[:stop] == prompt[:stop]:
            return True
    return False
