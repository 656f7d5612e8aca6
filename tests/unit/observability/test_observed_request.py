from __future__ import annotations

from quire.observability.observed_request import Phases, phases
from tests.unit.observability.records import LEDGER


def test_phases_add_up() -> None:
    assert phases(LEDGER, 100.0, None, 102.0) == Phases(queue=0.5, prefill=0.25, decode=1.25, inference=1.5)


def test_a_request_that_never_ran_has_no_phases() -> None:
    assert phases((), 100.0, None, 101.0) == Phases(None, None, None, None)
    assert phases(LEDGER[:2], 100.0, None, 101.0) == Phases(0.5, None, None, 0.5)
