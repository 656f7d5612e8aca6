"""Requests that were in the engine when it crashed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.serving.dispatch import quarantine
from quire.serving.dispatch.quarantine import Quarantine, Quarantined, content_digest
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams

SECONDS = 600.0


def make(text: int = 1, request_id: str = "r", **changes: object) -> Submit:
    sampling = SamplingParams(max_tokens=5, seed=7)
    return replace(Submit(request_id, pack_tokens([text, 2, 3]), sampling), **changes)  # type: ignore[arg-type]


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["own", "shared"])
def clocked(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Quarantine, Clock]:
    clock = Clock()
    path = tmp_path / "quarantine" if request.param == "shared" else None
    return Quarantine(SECONDS, path, clock), clock


def test_a_request_is_refused_after_two_crashes_and_not_after_one(clocked: tuple[Quarantine, Clock]) -> None:
    one, _ = clocked
    one.add_crash([make()], generation=1)
    one.check(make())
    one.add_crash([make()], generation=2)
    with pytest.raises(
        Quarantined, match=r"crashed 2 times .* refused for another 600 s; change the request"
    ) as raised:
        one.check(make())
    assert raised.value.retry_after == 600
    one.check(make(text=2))


def test_a_crash_that_several_edges_report_counts_once(clocked: tuple[Quarantine, Clock]) -> None:
    one, _ = clocked
    one.add_crash([make(), make(request_id="other")], generation=1)
    one.add_crash([make()], generation=1)
    one.check(make())


def test_the_same_body_is_known_whoever_sends_it_and_whatever_its_seed_is() -> None:
    other = make(request_id="x", priority=3, cache_salt="s", tenant="t", sampling=SamplingParams(max_tokens=5, seed=8))
    assert content_digest(other) == content_digest(make())
    assert content_digest(make(sampling=SamplingParams(max_tokens=6, seed=7))) != content_digest(make())
    assert content_digest(make(text=9)) != content_digest(make())


def test_a_request_that_finished_well_begins_anew(clocked: tuple[Quarantine, Clock]) -> None:
    one, _ = clocked
    one.add_crash([make()], generation=1)
    one.clear(make())
    one.add_crash([make()], generation=2)
    one.check(make())


def test_crashes_are_forgotten_after_a_while(clocked: tuple[Quarantine, Clock]) -> None:
    one, clock = clocked
    one.add_crash([make()], generation=1)
    one.add_crash([make()], generation=2)
    clock.now += SECONDS - 0.5
    assert one.seconds_left(make()) == 1
    clock.now += 1
    one.check(make())
    one.add_crash([make()], generation=3)
    one.check(make())


def test_edges_see_what_others_report_and_a_new_edge_what_was_reported(tmp_path: Path) -> None:
    first, second = Quarantine(SECONDS, tmp_path / "q"), Quarantine(SECONDS, tmp_path / "q")
    first.add_crash([make()], generation=1)
    second.add_crash([make(), make(text=5)], generation=2)
    for edge in (first, second, Quarantine(SECONDS, tmp_path / "q")):
        with pytest.raises(Quarantined):
            edge.check(make())
        edge.check(make(text=5))
    second.clear(make())
    first.check(make())


def test_the_store_is_bounded_and_forgets_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_ENTRIES", 3)
    one = Quarantine(SECONDS, tmp_path / "q")
    for text in range(5):
        one.add_crash([make(text)], generation=1)
        one.add_crash([make(text)], generation=2)
    assert [one.seconds_left(make(text)) is not None for text in range(5)] == [False, False, True, True, True]


def test_a_damaged_file_is_empty(tmp_path: Path) -> None:
    one = Quarantine(SECONDS, tmp_path / "q")
    one.add_crash([make()], generation=1)
    content = (tmp_path / "q").read_bytes()
    (tmp_path / "q").write_bytes(content[:20])
    other = Quarantine(SECONDS, tmp_path / "q")
    other.check(make())
    other.add_crash([make()], generation=2)
    other.check(make())
