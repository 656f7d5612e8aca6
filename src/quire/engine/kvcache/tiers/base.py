"""What the scheduler needs of the tiers beyond the device, and what there is without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.engine.kvcache.prefix_tree import Match, Node
from quire.engine.kvcache.tiers.host import Slot
from quire.types.stats import NO_TIERS, TierStats
from quire.types.transfer import NO_TRANSFERS, SlotMove, TransferReport, Transfers


class TierHit(NamedTuple):
    """How many of a sequence's first tokens are computed, on the device and in the slots of host memory that follow the
    whole blocks there. The last slot may hold a partial block."""

    num_tokens: int
    slots: tuple[Slot, ...] = ()


class Wanted(NamedTuple):
    """Whose tokens are looked for: the first `limit` of them. `swapped` of them may end within a block."""

    salt: str
    tokens: bytes  # int32
    limit: int
    swapped: int = 0


class Tiers(Protocol):
    """Decides which block's bytes are where beyond the device, and collects the orders that make it so.

    An owner `parks` blocks that must not be lost while it waits. Nothing here touches bytes, waits or fails.
    """

    def find(self, match: Match, wanted: Wanted) -> TierHit:
        """What follows the device's match in host memory. Changes nothing but the order of use."""

    def find_files(self, match: Match, wanted: Wanted) -> list[bytes]:
        """The files whose blocks follow what `find` finds, as far as host memory has room for all of it at once.
        Changes nothing but the order of use."""

    def keys(self, salt: str, tokens: bytes, num_tokens: int) -> list[bytes]:
        """The content hashes of the blocks of a sequence's first tokens, a partial tail included."""

    def evicted(self, node: Node, index: int) -> None:
        """The device gives away a cached block, by its place in a run of the prefix tree."""

    def kept(self, node: Node, first: int) -> None:
        """The device caches the blocks of a run from its `first`-th block on."""

    def num_missing(self, names: Mapping[bytes, int]) -> int | None:
        """How many of these blocks would have to be saved to park them; None if host memory has no room."""

    def park(self, owner: object, blocks: Mapping[bytes, int]) -> None:
        """Save these blocks, by name, and let nobody take their slots before `unpark`. There must be room."""

    def unpark(self, owner: object) -> None:
        """What an owner parked may go like anything else. Idempotent."""

    def hold(self, slot: Slot) -> None:
        """A slot is not given away before the plan in work is made, which may load it."""

    def fetch(self, names: Sequence[bytes]) -> list[bytes]:
        """Bring files to host memory, where they stay until `let_go`; returns those for which there is no room now."""

    def let_go(self, names: Sequence[bytes]) -> None:
        """Whoever asked for these files has come, or never will."""

    def is_fetching(self, name: bytes) -> bool:
        """Whether a file is on its way."""

    def give_up(self, num_files: int) -> None:
        """So many files were not there in time and are computed instead."""

    @property
    def has_orders(self) -> bool:
        """Whether something is to be carried out by the next plan."""

    def take_orders(self, loads: tuple[SlotMove, ...]) -> Transfers:
        """The orders of the plan in work, which ends with this. What is ordered later is the next one's."""

    @property
    def wants_report(self) -> bool:
        """Whether something may have come of earlier orders."""

    def take_report(self, report: TransferReport) -> None: ...

    def move_seconds(self, num_saved: int, num_loaded: int) -> float:
        """How long it takes to save so many blocks and to load so many."""

    def doubt(self, blocks: Mapping[bytes, int]) -> None:
        """These blocks were not moved because of `move_seconds`: now and then a few are, to measure it again."""

    def reset(self) -> None:
        """Forget everything, and have the files deleted."""

    def stats(self) -> TierStats: ...

    def check(self) -> None: ...


class NoTiers:
    """Holds nothing. What the device gives away is lost."""

    has_orders = wants_report = False

    def find(self, match: Match, wanted: Wanted) -> TierHit:  # noqa: ARG002 - Tiers' signature
        return TierHit(match.num_tokens)

    def find_files(self, match: Match, wanted: Wanted) -> list[bytes]:  # noqa: ARG002 - Tiers' signature
        return []

    def keys(self, salt: str, tokens: bytes, num_tokens: int) -> list[bytes]:  # noqa: ARG002 - Tiers' signature
        return []

    def evicted(self, node: Node, index: int) -> None: ...

    def kept(self, node: Node, first: int) -> None: ...

    def num_missing(self, names: Mapping[bytes, int]) -> int | None:  # noqa: ARG002 - Tiers' signature
        return None

    def park(self, owner: object, blocks: Mapping[bytes, int]) -> None: ...

    def unpark(self, owner: object) -> None: ...

    def hold(self, slot: Slot) -> None: ...

    def fetch(self, names: Sequence[bytes]) -> list[bytes]:  # noqa: ARG002 - Tiers' signature
        return []

    def let_go(self, names: Sequence[bytes]) -> None: ...

    def is_fetching(self, name: bytes) -> bool:  # noqa: ARG002 - Tiers' signature
        return False

    def give_up(self, num_files: int) -> None: ...

    def take_orders(self, loads: tuple[SlotMove, ...]) -> Transfers:  # noqa: ARG002 - Tiers' signature
        return NO_TRANSFERS

    def take_report(self, report: TransferReport) -> None: ...

    def move_seconds(self, num_saved: int, num_loaded: int) -> float:  # noqa: ARG002 - Tiers' signature
        return float("inf")

    def doubt(self, blocks: Mapping[bytes, int]) -> None: ...

    def reset(self) -> None: ...

    def stats(self) -> TierStats:
        return NO_TIERS

    def check(self) -> None: ...
