from __future__ import annotations

import numpy as np
import pytest

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.draft_length import DraftLength
from quire.engine.speculation.ngram import NgramProposers
from quire.engine.speculation.proposer import FOREVER, NO_PROPOSER, NoProposers
from quire.engine.speculation.registry import make_proposers
from quire.engine.speculation.runtime_drafts import RuntimeDraftProposers
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

NGRAM = SpeculationConfig(method="ngram", num_tokens=6)
DRAFT = SpeculationConfig(method="draft_model", num_tokens=4, model="small")
SELF = SpeculationConfig(method="self_draft", num_tokens=3, num_layers=2)


def request(prompt: tuple[int, ...], max_tokens: int = 64) -> Submit:
    return Submit("r", prompt, SamplingParams(max_tokens=max_tokens))


def test_a_requested_draft_is_proposed_once_and_only_for_what_it_followed() -> None:
    proposer = RuntimeDraftProposers(DRAFT, 1).begin(request((1, 2, 3)))
    assert proposer.num_ahead == 0
    assert proposer.propose(8) == ()
    assert 1 <= proposer.num_to_draft(8) <= 4
    proposer.observe((4,))
    proposer.offer((5, 6, 7))
    assert proposer.propose(2) == (5, 6)
    assert proposer.propose(0) == ()
    proposer.result(2, 1)
    proposer.observe((5, 9))
    assert proposer.propose(8) == ()


def test_a_draft_that_is_requested_as_a_probe_counts_as_one_when_it_is_verified() -> None:
    proposers, given, said = RuntimeDraftProposers(DRAFT, 1), list[bool](), [DraftLength(3, is_probe=True)]
    proposers.lengths.length = lambda *_, **__: said[-1]  # type: ignore[method-assign]
    proposers.lengths.note_result = lambda *_, is_probe: given.append(is_probe)  # type: ignore[method-assign]
    proposer = proposers.begin(request((1, 2, 3)))
    room = proposers.lengths.probe_room
    proposer.num_to_draft(8)
    assert proposers.lengths.probe_room == room - 3
    proposer.observe((4,))
    proposer.offer((5, 6, 7))
    said.append(DraftLength(3))  # the next one pays, and is requested before the first is verified
    for _ in range(2):
        proposer.propose(8)
        proposer.num_to_draft(8)
        proposer.result(3, 1)
        proposer.observe((5, 9))
        proposer.offer((5, 6, 7))
    assert given == [True, False]
    assert proposers.lengths.probe_room == room - 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_whose_drafts_fail_is_asked_ever_less(depth: int) -> None:
    proposers = RuntimeDraftProposers(DRAFT, depth)
    proposer = proposers.begin(request((1, 2, 3), 10_000))
    assert proposer.num_ahead == 0
    requests = tokens = 0
    while tokens < 4_000:
        if proposer.num_ahead:
            ahead = proposer.num_ahead
            proposer.observe((7,) * ahead)
            tokens += ahead
            continue
        requested = proposer.num_to_draft(8)
        requests += requested > 0
        proposer.observe((4,))
        proposers.note_step(1, 1, 0.01)
        if requested:
            proposer.offer((5,) * requested)
            proposer.result(len(proposer.propose(8)), 0)
            proposer.observe((6,))
            proposers.note_step(1 + requested, 1 + requested, 0.015)
        tokens += 2
    assert 2 < requests < 40


def generate(proposers: RuntimeDraftProposers, length: int, accepts: bool) -> int:
    """Let a sequence of so many tokens be generated; returns how often it was given a draft."""
    proposer = proposers.begin(request((1, 2, 3), 10_000))
    requests = tokens = 0
    while tokens < length:
        if proposer.num_ahead:
            ahead = min(proposer.num_ahead, length - tokens)
            for _ in range(ahead):
                proposers.note_step(1, 1, 0.01)
            proposer.observe((7,) * ahead)
            tokens += ahead
            continue
        requested = proposer.num_to_draft(8)
        proposer.observe((4,))
        proposers.note_step(1, 1, 0.01)
        tokens += 1
        if requested:
            requests += 1
            proposer.offer((5,) * requested)
            right = len(proposer.propose(8)) if accepts else 0
            proposer.result(requested, right)
            proposer.observe((5,) * right + (6,))
            proposers.note_step(1 + requested, 1 + requested, 0.012)
            tokens += right + 1
    return requests


def test_a_model_whose_drafts_fail_is_soon_not_asked_for_each_new_sequence() -> None:
    proposers = RuntimeDraftProposers(DRAFT, 2)
    requests = [generate(proposers, 160, accepts=False) for _ in range(100)]
    assert sum(requests[20:]) <= 80 * 160 / 400  # fewer than one in 400 tokens


def test_drafts_that_begin_to_pay_are_found_however_short_the_answers_are() -> None:
    proposers = RuntimeDraftProposers(DRAFT, 2)
    for _ in range(50):
        generate(proposers, 160, accepts=False)
    requests = [generate(proposers, 160, accepts=True) for _ in range(60)]
    assert sum(requests[:20]) > 0
    assert min(requests[-10:]) > 5


def test_a_sequence_for_which_no_draft_pays_runs_ahead_and_is_tried_later() -> None:
    proposers = RuntimeDraftProposers(DRAFT, 2)
    proposers.lengths.length = lambda *_, **__: DraftLength(0)  # type: ignore[method-assign]
    proposer = proposers.begin(request((1, 2, 3)))
    assert proposer.num_to_draft(8) == 0
    proposer.observe((4,))
    assert 0 < proposer.num_ahead < FOREVER
    proposer.observe((5,) * proposer.num_ahead)
    assert proposer.num_ahead == 0
    assert proposer.num_to_draft(8) == 2
    assert proposer.clone().num_ahead == 0


def test_runtime_drafts_are_never_observed_while_a_sequence_runs_ahead() -> None:
    proposers = RuntimeDraftProposers(DRAFT, 2)
    proposer = proposers.begin(request((1, 2, 3)))
    assert not proposer.is_observed
    with pytest.raises(AssertionError, match="observed"):
        proposers.observe([proposer], np.array([1], dtype=np.int32))
    proposer.close()


def test_a_request_for_one_token_gets_no_proposer() -> None:
    assert RuntimeDraftProposers(DRAFT, 1).begin(request((1, 2), 1)) is NO_PROPOSER


def test_without_speculation_nothing_is_proposed_or_observed() -> None:
    proposers = NoProposers()
    proposer = proposers.begin(request((1, 2, 1, 2)))
    assert proposer is NO_PROPOSER
    assert not proposer.is_observed
    assert proposer.num_ahead == FOREVER
    assert proposer.propose(4) == ()
    assert proposer.num_to_draft(4) == 0
    assert proposer.clone() is proposer
    assert list(proposers.observe((), np.empty(0, dtype=np.int32))) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_the_settings_choose_the_proposers(depth: int) -> None:
    assert isinstance(make_proposers(None, depth), NoProposers)
    assert isinstance(make_proposers(DRAFT, depth), RuntimeDraftProposers)
    assert isinstance(make_proposers(SELF, depth), RuntimeDraftProposers)
    assert isinstance(make_proposers(NGRAM, depth), NgramProposers)
