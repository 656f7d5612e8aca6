from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import numpy as np
import pytest

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation import ngram
from quire.engine.speculation.ngram import NgramProposer, NgramProposers
from quire.engine.speculation.ngram_index import CATCH_UP_TOKENS
from quire.engine.speculation.proposer import FOREVER, NO_PROPOSER, DraftProposer
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

NGRAM = SpeculationConfig(method="ngram", num_tokens=6)


def request(prompt: Sequence[int], max_tokens: int = 64) -> Submit:
    return Submit("r", tuple(prompt), SamplingParams(max_tokens=max_tokens))


def observe(proposers: NgramProposers, batch: Sequence[DraftProposer], tokens: Sequence[int]) -> list[int]:
    """One step in which these sequences ran ahead."""
    found = proposers.observe(tuple(batch), np.array(tokens, dtype=np.int32))
    proposers.note_step(len(batch), len(batch), 0.01)
    return list(found)


def close_gate(proposers: NgramProposers, rows: int = 1) -> None:
    """Drafts turn out slower than none."""
    for _ in range(20):
        proposers.note_step(rows, rows, 0.01)
    while proposers.lengths.allows_drafts:
        proposers.lengths.note_result(1, 0, is_probe=False)
        proposers.note_step(rows + 1, rows + 1, 0.1)


def open_gate(proposers: NgramProposers, rows: int = 1) -> None:
    while not proposers.lengths.allows_drafts:
        proposers.note_step(rows, rows, 0.01)


# ---------------------------------------------------------------------------------------------------------- paced
def test_a_proposer_proposes_what_followed_before_once_a_guess_was_right() -> None:
    proposer = NgramProposers(NGRAM, 1).begin(request((1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)))
    assert proposer.propose(3) == ()  # nobody knows yet whether this sequence repeats things
    proposer.observe((3,))
    assert proposer.propose(3) == (4, 5, 6)
    assert proposer.propose(0) == ()
    proposer.result(3, 3)
    proposer.observe((4, 5, 6, 7))
    assert proposer.propose(16)[:2] == (8, 9)
    assert proposer.num_to_draft(16) == 0


def test_guesses_that_are_wrong_are_not_verified_for_long() -> None:
    rng = random.Random(0)
    proposer = NgramProposers(NGRAM, 1).begin(request(rng.choices(range(8), k=200)))
    drafted = 0
    for _ in range(300):
        draft = proposer.propose(8)
        drafted += len(draft)
        if draft:
            proposer.result(len(draft), 0)
        token = rng.randrange(100, 110)
        proposer.observe((token, *rng.choices(range(8), k=2)))
    assert drafted < 30


def test_new_text_is_not_guessed_at() -> None:
    proposer = NgramProposers(NGRAM, 1).begin(request(range(40)))
    for token in range(100, 140):
        assert proposer.propose(8) == ()
        assert proposer.num_ahead == FOREVER
        proposer.observe((token,))


def test_a_sequence_stays_paced_while_it_has_a_draft() -> None:
    proposer = NgramProposers(NGRAM, 2).begin(request(range(50)))
    assert proposer.num_ahead == FOREVER
    proposer.observe((10, 11, 12, 13))  # of these, the last two could have been guessed
    assert proposer.num_ahead == 0
    assert proposer.propose(2) == (14, 15)
    proposer.result(2, 0)
    proposer.observe((99,))
    assert proposer.num_ahead == FOREVER


def test_what_the_runtime_drafted_is_refused_as_nobody_requested_it() -> None:
    proposer = NgramProposers(NGRAM, 1).begin(request((1, 2)))
    with pytest.raises(AssertionError, match="not requested"):
        proposer.offer((1, 2))


def test_a_request_for_one_token_gets_no_proposer() -> None:
    assert NgramProposers(NGRAM, 1).begin(request((1, 2), 1)) is NO_PROPOSER


# ---------------------------------------------------------------------------------------------------------- ahead
@pytest.mark.parametrize("rows", [1, 5, ngram._FEW_ROWS, 100])
def test_sequences_that_run_ahead_are_returned_when_a_draft_is_worth_it(rows: int) -> None:
    proposers = NgramProposers(NGRAM, 2)
    batch = [proposers.begin(request(range(row, row + 20))) for row in range(rows)]
    assert all(proposer.is_observed for proposer in batch)
    chosen, found = rows // 2, []
    for offset in range(6):  # one repeats its prompt, the others say something new
        tokens = [1_000 + 10 * row + offset for row in range(rows)]
        tokens[chosen] = chosen + 5 + offset
        found.append(observe(proposers, batch, tokens))
    assert found[:2] == [[], []]  # an n-gram has two tokens, and the first guess is only a shadow
    assert found[-1] == [chosen]
    assert batch[chosen].num_ahead == 0
    assert batch[chosen].propose(3) == (chosen + 11, chosen + 12, chosen + 13)
    assert [place for place, proposer in enumerate(batch) if proposer.num_ahead == 0] == [chosen]


def test_a_batch_may_change_from_step_to_step() -> None:
    rng, proposers = random.Random(1), NgramProposers(NGRAM, 2)
    live = [proposers.begin(request(range(30))) for _ in range(60)]
    for _ in range(40):
        batch = rng.sample(live, 40)
        observe(proposers, batch, [rng.randrange(30) for _ in batch])
        live.remove(batch[0])
        batch[0].close()
        live.append(proposers.begin(request(rng.choices(range(30), k=9))))
    assert proposers.num_slots <= 60


def test_a_sequence_that_ended_is_not_observed_in_the_slot_of_another() -> None:
    proposers = NgramProposers(NGRAM, 2)
    batch = tuple(proposers.begin(request(range(20))) for _ in range(3))
    tokens = np.array([5, 5, 5], dtype=np.int32)
    proposers.observe(batch, tokens)
    batch[1].close()
    with pytest.raises(AssertionError, match="ended"):
        proposers.observe(batch, tokens)
    other = proposers.begin(request((7, 8, 9, 7)))
    rest = (batch[0], other, batch[2])
    for token in (8, 9, 7):
        proposers.observe(rest, np.array([6, token, 6], dtype=np.int32))
    assert other.propose(2) == (8, 9)


@pytest.mark.parametrize("rows", [1, 100])
def test_while_the_gate_is_closed_tokens_are_kept_and_found_when_it_opens(rows: int) -> None:
    proposers = NgramProposers(NGRAM, 2)
    batch = [proposers.begin(request((1, 2, 3))) for _ in range(rows)]
    close_gate(proposers, rows)
    for token in range(100, 120):
        assert observe(proposers, batch, [token] * rows) == []
    batch[0].observe((120, 121))
    assert batch[0].propose(4) == ()
    assert batch[0].num_ahead == FOREVER
    open_gate(proposers, rows)
    for token in (104, 105, 106, 107):
        found = observe(proposers, batch, [token] * rows)
    assert 0 in found
    assert batch[0].propose(2) == (108, 109)


def test_a_guess_from_before_the_gate_closed_is_not_scored_after_it_opened() -> None:
    proposers = NgramProposers(NGRAM, 1)
    proposer = proposers.begin(request((1, 2, 3, 4, 1, 2)))
    assert proposer.propose(4) == ()
    close_gate(proposers)
    observe(proposers, [proposer], [50])
    open_gate(proposers)
    observe(proposers, [proposer], [3])  # what was guessed to follow 1, 2
    observe(proposers, [proposer], [4])
    assert proposer.num_ahead == FOREVER


def test_a_long_prompt_is_looked_up_only_when_all_of_it_is_indexed() -> None:
    proposers = NgramProposers(NGRAM, 2)
    long = proposers.begin(request(range(2 * CATCH_UP_TOKENS)))
    steps = 0
    while not observe(proposers, [long], [1_000 + steps]):
        steps += 1
        assert steps < 20
    assert steps >= 3
    assert long.propose(2) == (1_001 + steps, 1_002 + steps)


# ---------------------------------------------------------------------------------------------------- coming and going
def test_a_clone_continues_from_the_same_tokens_alone() -> None:
    proposers = NgramProposers(NGRAM, 1)
    one = proposers.begin(request((1, 2, 3, 4, 5, 6)))
    one.observe((1, 2))
    other = one.clone()
    other.observe((3, 4))
    assert other.propose(2) == (5, 6)
    one.observe((9,))
    assert one.propose(2) == ()


def test_a_request_that_waits_holds_no_slot_and_neither_does_its_clone() -> None:
    proposers = NgramProposers(NGRAM, 1)
    waiting = [proposers.begin(request(range(100))) for _ in range(1_000)]
    waiting += [proposer.clone() for proposer in waiting]
    assert not any(proposer.num_ahead == 0 for proposer in waiting)
    assert proposers.num_slots == 0


def test_closing_gives_the_slot_back_once() -> None:
    proposers = NgramProposers(NGRAM, 1)
    one, other = (proposers.begin(request((1, 2, 3))) for _ in range(2))
    one.observe((4,))
    other.observe((5,))
    one.close()
    one.close()
    assert proposers.num_slots == 1
    third = proposers.begin(request((1, 2, 3)))
    third.observe((4,))
    assert isinstance(third, NgramProposer)
    assert isinstance(other, NgramProposer)
    assert third.slot != other.slot


def test_the_slot_of_a_sequence_that_nobody_closed_is_used_again() -> None:
    proposers = NgramProposers(NGRAM, 1)
    for _ in range(300):
        proposer: DraftProposer | None = proposers.begin(request(range(50)))
        assert proposer is not None
        proposer.observe((1, 2, 3))
        proposer = None
        proposers.note_step(1, 1, 0.01)
    gc.collect()
    proposers.note_step(1, 1, 0.01)
    assert proposers.num_slots == 0
