"""How a step's tokens are shared between prompts in work and those that wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from quire.engine.decoding.group import Group

_SHORT = 4  # a prompt is short beside one that owes so many times as much
_SHARE = 2  # for short ones, one in so many tokens of the budget is held back at most


def held_back(
    budget: int, owing: Collection[Group], waiting: Iterable[Group], goes_before: Callable[[Group, Group], bool]
) -> int:
    """Tokens that running prompts leave to those first in line: all that these owe if the policy says that they go
    before, and up to half of the budget if they are short beside them.

    So a prompt of many steps delays short ones by no step, and takes at most twice as many steps for them.
    """
    most = max(group.leader.num_known - group.leader.computed for group in owing) // _SHORT
    held = 0
    for group in waiting:
        owed = group.leader.num_known
        is_short = owed <= most and held + owed <= budget // _SHARE
        if not is_short and not all(goes_before(group, running) for running in owing):
            break
        held += owed
    return min(held, budget)


def chunk_size(owed: int, left: int, budget: int, *, alone: bool) -> int:
    """Tokens of a prompt that a step computes where `left` of its budget are left. One that does not fit takes half of
    the budget at most beside those who decode: they, and whoever comes next, do not wait for twice as long a step."""
    if owed > left and not alone:
        return min(left, -(-budget // _SHARE))
    return min(owed, left)
