"""The remote tier: what it learns by lookups, what it sends and receives, and what it forgets."""

from __future__ import annotations

from quire.config.transport import KVRole, TransportConfig
from quire.engine.handover import HANDOVER_SECONDS, Handover
from quire.engine.kvcache.tiers.base import NoTiers
from quire.engine.kvcache.tiers.host import HostTier, Slot
from quire.engine.kvcache.tiers.remote import RemoteTier
from quire.types.output import Finished, SampleEnd
from quire.types.transfer import FailedFile, Lookup, LookupResult, TransferReport

A, B, C = (bytes([number]) * 32 for number in range(3))


def make(role: KVRole = "both", num_slots: int = 8) -> tuple[RemoteTier, HostTier]:
    host = HostTier(num_slots)
    return RemoteTier(host, TransportConfig(role, "kv")), host


def saved(host: HostTier, key: bytes) -> Slot:
    slot = host.take()
    assert slot is not None
    host.assign(slot, key)
    host.release(slot)
    return slot


def test_a_lookup_tells_which_blocks_there_are() -> None:
    tier, _ = make()
    number = tier.ask([A, B], [C], 1.5)
    assert number is not None
    assert tier.has_transfers
    assert tier.take_remote().lookups == (Lookup(number, (A, B, C), 2, 1.5),)
    assert tier.is_asking(number)
    assert A not in tier
    tier.apply_report(TransferReport(looked_up=(LookupResult(number, (A, C)),)))
    assert not tier.is_asking(number)
    assert [key in tier for key in (A, B, C)] == [True, False, True]
    again = tier.ask([A], [], 0.0)
    assert again is not None
    tier.apply_report(TransferReport(looked_up=(LookupResult(again, (), "timeout"),)))
    assert A not in tier
    assert tier.failures == {"transport_timeout": 1}
    tier.take_remote()
    tier.check()


def test_a_block_is_received_once_and_counts_as_remote() -> None:
    tier, host = make("decode")
    number = tier.ask([A, B], [], 0.0)
    tier.apply_report(TransferReport(looked_up=(LookupResult(number or 0, (A, B)),)))
    assert tier.fetch([A, B, A]) == []
    gets = tier.take_remote().gets
    assert [move.key for move in gets] == [A, B]
    tier.apply_report(TransferReport(got=(A,), lost=(FailedFile(B, "corrupt"),)))
    slot = host.find(A)
    assert slot is not None
    assert slot.take_source() == "remote"
    assert B not in tier
    assert tier.failures == {"transport_corrupt": 1}
    tier.release_fetched([A, B])
    assert host.num_held == 0
    tier.check()


def test_only_an_engine_that_puts_sends_and_each_block_once() -> None:
    tier, host = make("decode")
    tier.store(A, saved(host, A))
    assert not tier.has_transfers
    tier, host = make("prefill")
    slot = saved(host, A)
    tier.store(A, slot)
    tier.store(A, slot)
    assert [move.key for move in tier.take_remote().puts] == [A]
    assert host.num_held == 1
    assert tier.put_counts == (1, 0)
    tier.apply_report(TransferReport(put=(A,)))
    assert host.num_held == 0
    assert tier.put_counts == (1, 1)
    tier.store(A, slot)
    assert not tier.has_transfers


def test_clearing_forgets_what_is_known_and_deletes_nothing() -> None:
    tier, host = make()
    tier.store(A, saved(host, A))
    tier.clear()
    assert not tier.has_transfers
    assert host.num_held == 0
    assert A not in tier
    tier.check()


class CountingTiers(NoTiers):
    counts = (0, 0)

    def put_counts(self) -> tuple[int, int]:
        return self.counts


def test_terminal_messages_wait_for_the_blocks_before_them() -> None:
    now, tiers = [0.0], CountingTiers()
    handover = Handover(tiers, lambda: now[0])
    one, two, late = (Finished(name, (SampleEnd(0, (1,), "length"),)) for name in "abc")
    failed, aborted = Finished("d", (), error="no"), Finished("e", (SampleEnd(0, (), "abort"),))
    assert handover.take([one], is_dead=False) == (one,)  # nothing is being sent
    tiers.counts = (5, 3)
    assert handover.take([one, failed, aborted], is_dead=False) == (failed, aborted)
    tiers.counts = (8, 4)
    assert handover.take([two], is_dead=False) == ()
    tiers.counts = (9, 5)
    assert handover.take([], is_dead=False) == (one,)
    assert handover.take([late], is_dead=False) == ()
    now[0] = HANDOVER_SECONDS
    assert handover.take([], is_dead=False) == (two, late)
    assert handover.take([one], is_dead=False) == ()
    assert handover.take([], is_dead=True) == (one,)
    assert not len(handover)
