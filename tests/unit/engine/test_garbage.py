"""Garbage is collected between steps: new cycles soon, old ones when there are many more objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from quire.engine.garbage import GarbageCollector


class Knot:
    """An object that refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _python_collects_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as before: see conftest.py
    gc.enable()


def test_a_new_cycle_is_freed_when_enough_objects_are_new() -> None:
    garbage = GarbageCollector(new=300)
    lost = weakref.ref(Knot())
    garbage.collect()
    assert lost() is not None
    kept = [[] for _ in range(400)]  # type: ignore[var-annotated]
    garbage.collect()
    assert lost() is None
    assert not gc.isenabled()
    assert len(kept) == 400


def test_the_first_collection_skips_objects_that_were_frozen_before() -> None:
    frozen = Knot()
    gc.freeze()
    old, new = weakref.ref(frozen), weakref.ref(Knot())
    del frozen
    GarbageCollector()
    assert old() is not None
    assert new() is None


def test_objects_that_stay_are_looked_at_once() -> None:
    garbage = GarbageCollector(new=300)
    before = gc.get_freeze_count()
    kept = [[] for _ in range(400)]  # type: ignore[var-annotated]
    garbage.collect()
    assert gc.get_freeze_count() >= before + len(kept)
    assert gc.get_count()[0] < 300


def test_cycles_of_old_objects_are_freed_when_there_are_many_more_objects() -> None:
    gc.freeze()
    garbage = GarbageCollector(new=300, more=10_000 - gc.get_freeze_count())  # that is, about 10,000 more
    knot = Knot()
    old = weakref.ref(knot)
    kept: list[list[int]] = [[] for _ in range(400)]
    garbage.collect()  # it is frozen with the others
    del knot
    kept += [[] for _ in range(400)]
    garbage.collect()
    assert old() is not None
    kept += [[] for _ in range(20_000)]
    garbage.collect()
    assert old() is None
