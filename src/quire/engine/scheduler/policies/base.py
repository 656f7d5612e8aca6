"""What a scheduling policy decides, and what it may look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.engine.decoding.group import Group
    from quire.engine.kvcache.pool import BlockPool
    from quire.engine.scheduler.queue import GroupQueue
    from quire.engine.scheduler.row_table import RowTable
    from quire.types.step import Ints

Key = tuple[float, ...]


class View(Protocol):
    """The scheduler as policies see it. They change nothing in it."""

    waiting: GroupQueue
    running: GroupQueue
    rows: RowTable
    pool: BlockPool
    block_size: int
    num_plans: int  # made so far

    @property
    def tick(self) -> int:
        """Steps in which those that decode have advanced."""

    @property
    def num_decoding(self) -> int:
        """Tokens that those that decode take of the next step."""

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens of running groups are still to be computed."""

    def num_cached(self, group: Group) -> int:
        """How many of the tokens that a waiting group owes are in the prefix cache."""


class Policy:
    """Who goes before whom: in order of arrival. A policy changes what it must and leaves the rest as it is here.

    `added`, `admitted` and `left` are told of every group: a preempted one left and was added again. A group that waits
    is `deferred` while it is not ready, as another request computes the same prefix, and `resumed` when it is; the
    waiting queue passes it over meanwhile, and so must `choose`.
    """

    counts_outputs = False  # whether `generated` and `generated_paced` are to be called

    def key(self, group: Group) -> Key:
        """Where a group stands among those that wait and among those that run: unique, unchanging, smaller first.

        Of those that run, the last is preempted first.
        """
        return (group.ordinal,)

    def choose(self, view: View) -> Group | None:
        """Who is admitted next, of those that are ready; None: nobody now. Asked again after each admission."""
        return view.waiting.first()

    def soon(self, view: View, count: int) -> list[Group]:
        """Who is likely to be admitted next, so many at most. Decides nothing."""
        return view.waiting.head(count)

    def goes_before(self, waiting: Group, running: Group) -> bool:  # noqa: ARG002 - for those that look
        """Whether a running prompt waits for one that can be admitted."""
        return False

    def budget(self, limit: int, view: View) -> int:  # noqa: ARG002 - for those that look
        """How many tokens the next step may compute, `limit` at most."""
        return limit

    def pauses(self, view: View) -> bool:  # noqa: ARG002 - for those that look
        """Whether those that decode wait in the next step, if there is a prompt to compute in it."""
        return False

    def reserved(self, group: Group) -> int:  # noqa: ARG002 - for those that reserve
        """Token slots that a group is given at admission; 0: blocks as it needs them."""
        return 0

    def added(self, group: Group, view: View) -> None:
        """A group waits from now on; it is in the queue already."""

    def deferred(self, group: Group) -> None:
        """A waiting group is not ready."""

    def resumed(self, group: Group) -> None:
        """A deferred group is ready."""

    def admitted(self, group: Group, view: View) -> None:
        """A group was admitted; its sequences have rows."""

    def generated(self, rows: Ints) -> None:
        """Each of these rows, which run ahead, generated a token."""

    def generated_paced(self, group: Group, num_tokens: int) -> None:
        """Paced sequences of a group generated so many tokens."""

    def left(self, group: Group, view: View) -> None:
        """A group ended or was preempted; `group.is_running` says where it was."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
