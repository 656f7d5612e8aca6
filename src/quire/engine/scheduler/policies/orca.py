"""Iteration-level scheduling over contiguous memory: each sequence reserves a run of blocks for its whole life."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.kvcache.reserve import reserved_tokens
from quire.engine.scheduler.policies.base import Policy


class Orca(Policy):
    """In order of arrival, as long as a run of free blocks is long enough.

    How much a sequence reserves is the variant's: the longest the model allows, its prompt and the next power of two
    of its outputs, or its true length. The engine knows no true length, but the most that `max_tokens` allows: with
    `ignore_eos` they are the same, and only then is the oracle one.
    """

    def __init__(self, name: str, max_model_len: int) -> None:
        self._name, self._max_model_len = name, max_model_len

    def reserved(self, group: Group) -> int:
        return reserved_tokens(self._name, group.num_prompt, group.limit, self._max_model_len)
