"""Static batching, as before iteration-level scheduling: a batch runs to its end before the next is let in."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, View


class StaticBatch(Policy):
    """When nobody runs, the first that wait become a batch: as many as rows and memory hold if each row is given room
    for the longest of them. Prompts are computed first, then all decode; what an early end frees stays unused.
    """

    def __init__(self) -> None:
        self._batch: dict[Group, None] = {}  # those still to be let in
        self._padded = 0  # tokens of its longest sequence

    def choose(self, view: View) -> Group | None:
        if not self._batch and not len(view.running):
            self._form(view)
        return next(iter(self._batch), None)

    def pauses(self, view: View) -> bool:
        return bool(self._batch) or view.is_prefilling

    def reserved(self, group: Group) -> int:
        return max(self._padded, group.limit)

    def left(self, group: Group, view: View) -> None:  # noqa: ARG002 - Policy's signature
        self._batch.pop(group, None)

    def admitted(self, group: Group, view: View) -> None:  # noqa: ARG002 - Policy's signature
        self._batch.pop(group, None)

    def _form(self, view: View) -> None:
        self._padded = 0
        for group in view.waiting.head(view.rows.num_free):
            padded, count = max(self._padded, group.limit), len(self._batch) + 1
            if count > 1 and count * -(-padded // view.block_size) > view.pool.num_blocks:
                return
            self._batch[group], self._padded = None, padded
