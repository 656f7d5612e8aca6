"""The base class of scheduling policies, and the view of the scheduler that they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.engine.decoding.group import Group
    from quire.engine.kvcache.pool import BlockPool
    from quire.engine.scheduler.queue import GroupQueue, RunningGroups
    from quire.engine.scheduler.row_table import RowTable
    from quire.types.step import Ints

Key = tuple[float, ...]


class SchedulerView(Protocol):
    """The part of the scheduler that policies may read. They must not change it."""

    waiting: GroupQueue
    running: RunningGroups
    rows: RowTable
    pool: BlockPool
    block_size: int
    num_plans: int  # plans made so far

    @property
    def tick(self) -> int:
        """The number of steps in which the sequences that run ahead advanced."""

    @property
    def num_decoding(self) -> int:
        """How many tokens of the next step decoding sequences take."""

    @property
    def is_prefilling(self) -> bool:
        """Whether running groups owe known tokens."""

    def num_cached(self, group: Group) -> int:
        """Return how many of the tokens that a waiting group owes are in the prefix cache."""


class Policy:
    """The base class of all policies: it admits groups in order of arrival. Subclasses override single decisions.

    The scheduler calls `added`, `admitted` and `removed` for every group; a preempted group is removed and added again.
    It calls `deferred` for a waiting group that must not be admitted yet, because another request computes the same
    prefix, its blocks are being read from disk, or there is no slot for its LoRA adapter, and `resumed` when it may be
    admitted. The waiting queue skips deferred groups, and so must `choose`.
    """

    counts_outputs = False  # whether the engine calls `note_generated` and `note_generated_paced`

    def key(self, group: Group) -> Key:
        """Return the sort key of a waiting or running group. It must be unique and must never change. The smallest key
        is admitted first; the group with the largest key is preempted first."""
        return (group.ordinal,)

    def choose(self, view: SchedulerView) -> Group | None:
        """Return the ready group to admit next; None: admit no group now. Called again after each admission."""
        ready = view.waiting.ready
        return ready[0] if ready else None

    def rank(self, group: Group) -> Key:
        """Return the current position of a waiting group in the order of admission, including deferred groups; the
        smallest rank is first. Unlike the key, it may change."""
        return self.key(group)

    def likely_next(self, view: SchedulerView, count: int) -> list[Group]:
        """Return up to `count` groups that are likely to be admitted next. The result decides nothing."""
        return view.waiting.head(count)

    def overtakes(self, waiting: Group, running: Group) -> bool:  # noqa: ARG002 - for subclasses
        """Whether a waiting group's prompt is computed before a running group's prompt."""
        return False

    def budget(self, limit: int, view: SchedulerView) -> int:  # noqa: ARG002 - for subclasses
        """Return how many tokens the next step may compute, at most `limit`."""
        return limit

    def pauses_decoding(self, view: SchedulerView) -> bool:  # noqa: ARG002 - for subclasses
        """Whether decoding pauses in the next step, if that step computes a prompt."""
        return False

    def reserved(self, group: Group) -> int:  # noqa: ARG002 - for subclasses
        """Return how many token slots a group reserves on admission; 0: it gets blocks as it needs them."""
        return 0

    def added(self, group: Group, view: SchedulerView) -> None:
        """Note that a group was added to the waiting queue."""

    def deferred(self, group: Group) -> None:
        """Note that a waiting group must not be admitted for now."""

    def resumed(self, group: Group) -> None:
        """Note that a deferred group may be admitted again."""

    def admitted(self, group: Group, view: SchedulerView) -> None:
        """Note that a group was admitted. Its sequences have rows."""

    def note_generated(self, rows: Ints) -> None:
        """Note that each of these rows, which run ahead, has generated a token."""

    def note_generated_paced(self, group: Group, num_tokens: int) -> None:
        """Note that paced sequences of a group have generated `num_tokens` tokens."""

    def removed(self, group: Group, view: SchedulerView) -> None:
        """Note that a group ended or was preempted. `group.is_running`: it was running, not waiting."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Note that a step of `num_tokens` tokens took `seconds`."""
