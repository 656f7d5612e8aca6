"""Static batching, the baseline without continuous batching: the next batch is admitted when all requests of the last
one have ended."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, SchedulerView


class StaticBatch(Policy):
    """When no group runs, the first waiting groups become a batch: as many as fit if each reserves memory for the
    longest of them. Decoding pauses until all prompts of the batch are computed. The memory of a sequence that ends
    early stays unused until the batch ends."""

    def __init__(self) -> None:
        self._batch: dict[Group, None] = {}  # groups of the batch that are still to be admitted
        self._padded = 0  # tokens of the longest sequence in the batch

    def choose(self, view: SchedulerView) -> Group | None:
        if not self._batch and not len(view.running):
            self._form(view)
        return next(iter(self._batch), None)

    def pauses_decoding(self, view: SchedulerView) -> bool:
        return bool(self._batch) or view.is_prefilling

    def reserved(self, group: Group) -> int:
        return max(self._padded, group.limit)

    def deferred(self, group: Group) -> None:
        self._batch.pop(group, None)  # a later batch will contain it

    def removed(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        self._batch.pop(group, None)

    def admitted(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        self._batch.pop(group, None)

    def _form(self, view: SchedulerView) -> None:
        self._padded = 0
        for group in view.waiting.head(view.rows.num_free):
            padded, count = max(self._padded, group.limit), len(self._batch) + 1
            if count > 1 and count * -(-padded // view.block_size) > view.pool.num_blocks:
                return
            self._batch[group], self._padded = None, padded
