"""Iteration-level scheduling over contiguous memory: each sequence reserves an extent of adjacent blocks for its whole
life."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.kvcache.contiguous import reserved_tokens
from quire.engine.scheduler.policies.base import Policy


class Orca(Policy):
    """Admits in order of arrival, while an extent of free blocks is long enough.

    The variant decides how much a sequence reserves: the model's maximum length (orca-max), its prompt plus the next
    power of two of its outputs (orca-pow2), or its true length (orca-oracle). The engine takes `max_tokens` for the
    true length, so the oracle is exact only with `ignore_eos`.
    """

    def __init__(self, name: str, max_model_len: int) -> None:
        self._name, self._max_model_len = name, max_model_len

    def reserved(self, group: Group) -> int:
        return reserved_tokens(self._name, group.num_prompt, group.limit, self._max_model_len)
