"""How a step's tokens are shared between running prompts and those that wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from quire.engine.decoding.group import Group

_SHORT = 4  # a prompt is short beside one that owes so many times as much
_SHARE = 2  # for short ones, one in so many tokens of the budget is held back at most


def held_back(
    budget: int,
    owing: Collection[Group],
    waiting: Iterable[Group],
    goes_before: Callable[[Group, Group], bool],
    num_cached: Callable[[Group], int],
) -> int:
    """Tokens of the budget that running prompts leave to waiting groups, the first in line first: all that a group owes
    if the policy says that it goes before, and up to half of the budget for groups that owe little beside them.

    So a prompt of many steps delays short ones by no step, and takes at most twice as many steps for them.
    """
    most = max(group.leader.num_tokens - group.leader.num_computed for group in owing) // _SHORT
    held = 0
    for group in waiting:
        owed = group.leader.num_tokens - num_cached(group)
        is_short = owed <= most and held + owed <= budget // _SHARE
        if not is_short and not all(goes_before(group, running) for running in owing):
            break
        held += owed
    return min(held, budget)


def chunk_size(owed: int, left: int, budget: int, *, alone: bool) -> int:
    """Tokens of a prompt that a step computes, of whose budget `left` tokens are left. A prompt that does not fit
    takes at most half of the budget beside sequences that decode, so that their steps do not become twice as long."""
    if owed > left and not alone:
        return min(left, -(-budget // _SHARE))
    return min(owed, left)
