"""Rows are given, taken back and given again; what came back for each is kept as a dictionary would keep it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from plain_groups import add_sequence, make_group
from quire.engine.commit import RowColumns, find_ends
from quire.engine.decoding.controller import PLAIN, StepController
from quire.engine.decoding.group import Sequence
from quire.engine.scheduler.row_table import MOST_END_IDS, RowTable
from quire.types.sampling import TokenRules
from toy_decoding import ToyMatcher, ToyProposer, ToyProposers


def guided() -> StepController:
    return StepController(TokenRules(), matcher=ToyMatcher("g", ()))


def observed() -> StepController:
    return StepController(TokenRules(), proposer=ToyProposer(ToyProposers(), 100, 0, [], is_observed=True))


def ends_of(table: RowTable, row: int) -> set[int]:
    return {end for end in table.end_ids[:, row].tolist() if end != -1} | table.many_end_ids.get(row, frozenset())


@dataclass
class Model:
    """What each row should hold."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)

    def compare(self, table: RowTable, num_rows: int, reserved: int) -> None:
        table.check()
        assert table.num_taken == len(self.sequences)
        assert table.num_free == num_rows - len(self.sequences) - reserved
        for row, sequence in self.sequences.items():
            group, controller = sequence.group, sequence.controller
            assert table.sequence_at(row) is table.sequences[row] is sequence
            assert table.outputs(row) == self.outputs[row]
            assert table.output_bytes(row) == np.array(self.outputs[row], dtype=np.int32).tobytes()
            assert table.counts[row] == len(self.outputs[row])
            assert table.limits[row] == group.limit - group.num_prompt
            assert table.handles[row] == sequence.handle
            assert ends_of(table, row) == set(group.request.rules.end_ids)
            assert table.guided[row] == controller.is_guided
            assert table.observed[row] == controller.proposer.is_observed
        assert table.num_guided == sum(each.controller.is_guided for each in self.sequences.values())
        assert table.num_observed == sum(each.controller.proposer.is_observed for each in self.sequences.values())
        assert table.num_not_streamed == sum(each.handle < 0 for each in self.sequences.values())
        free = [row for row in range(num_rows) if row not in self.sequences]
        assert not table.guided[free].any()
        assert not table.observed[free].any()
        assert not table.leases[free].any()


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_rows_hold_what_a_dictionary_would(num_rows: int, seed: int) -> None:
    rng, table, model, reserved = random.Random(seed), RowTable(num_rows), Model(), 0
    for number in range(600):
        version = table.version
        choice, taken = rng.random(), list(model.sequences)
        if choice < 0.35 and table.num_free > 0:
            sequence = _draw(rng, number)
            row = table.assign(sequence)
            assert sequence.row == row
            assert row not in model.sequences
            assert int(table.leases[row]) not in model.leases, "a lease was used again"
            model.leases.add(int(table.leases[row]))
            model.sequences[row], model.outputs[row] = sequence, list(sequence.outputs)
            assert table.version != version
        elif choice < 0.5 and taken:
            row = rng.choice(taken)
            sequence = model.sequences.pop(row)
            assert table.release(sequence) == row
            assert (sequence.row, sequence.outputs) == (None, model.outputs.pop(row))
            assert table.version != version
        elif choice < 0.55:
            change = rng.choice([-reserved, min(table.num_free, 2)])
            table.reserve(change)
            reserved += change
        else:
            _grow(rng, table, model, [row for row in taken if _room(table, row) > 0])
            assert table.version == version
        model.compare(table, num_rows, reserved)


def _room(table: RowTable, row: int) -> int:
    """Outputs that a row may still get: the last one ends its sequence, which leaves the row with it."""
    return int(table.limits[row] - table.counts[row]) - 1


def _draw(rng: random.Random, number: int) -> Sequence:
    """A sequence of any kind; some know outputs from before."""
    end_ids = tuple(rng.sample(range(90), rng.choice([0, 1, 2, 4, 5, 9, 30])))
    group = make_group([1] * rng.randint(1, 5), number, max_tokens=rng.choice([4, 9, 300, 1_000]), end_ids=end_ids)
    controller = rng.choice([PLAIN, PLAIN, guided(), observed()])
    sequence = add_sequence(group, controller=controller, is_streamed=rng.random() < 0.8)
    sequence.outputs = [rng.randrange(90) for _ in range(rng.randrange(4))]
    return sequence


def _grow(rng: random.Random, table: RowTable, model: Model, rows: list[int]) -> None:
    """Outputs come back, for several rows at once or several for one row; beams get other ones."""
    if not rows:
        return
    choice = rng.random()
    if choice < 0.6:
        chosen = rng.sample(rows, rng.randint(1, len(rows)))
        tokens = [rng.randrange(90) for _ in chosen]
        rows = np.array(chosen, dtype=np.intp)
        counts = table.record(rows, table.starts[rows], np.array(tokens, dtype=np.int32))
        for row, token in zip(chosen, tokens, strict=True):
            model.outputs[row].append(token)
        assert counts.tolist() == [len(model.outputs[row]) for row in chosen]
        return
    row = rng.choice(rows)
    drawn = [rng.randrange(90) for _ in range(rng.randint(1, min(_room(table, row), 400)))]
    if choice < 0.85:
        table.extend(row, tuple(drawn))
        model.outputs[row] += drawn
    else:
        table.rewrite(row, drawn)
        model.outputs[row] = drawn
    start = rng.randint(0, len(model.outputs[row]))
    assert table.outputs(row, start) == model.outputs[row][start:]


def test_end_ids_of_the_sequence_before_do_not_end_the_next_one() -> None:
    table = RowTable(1)
    for end_ids in ((1, 2, 3, 4, 5, 6), (7,), (), (8, 9), (8, 9), (1, 2, 3, 4, 5, 6)):
        sequence = add_sequence(make_group([1], end_ids=end_ids))
        row = table.assign(sequence)
        assert ends_of(table, row) == set(end_ids)
        table.release(sequence)


def test_a_wider_row_leaves_what_others_have_as_it_is() -> None:
    table = RowTable(2)
    one = add_sequence(make_group([1], end_ids=(5, 6), max_tokens=200))
    row = table.assign(one)
    table.extend(row, tuple(range(90)))
    other = add_sequence(make_group([1], 1, end_ids=tuple(range(40)), max_tokens=5_000))
    table.assign(other)
    assert table.outputs(row) == list(range(90))
    assert ends_of(table, row) == {5, 6}
    table.check()


@pytest.mark.parametrize("num_ends", [MOST_END_IDS, MOST_END_IDS + 1, 1_000])
def test_a_row_with_many_end_ids_ends_by_each_and_lets_no_other_row_compare_more(num_ends: int) -> None:
    table = RowTable(2)
    many = table.assign(add_sequence(make_group([1], end_ids=tuple(range(10, 10 + num_ends)))))
    other = table.assign(add_sequence(make_group([1], 1, end_ids=(5, 6))))
    columns = RowColumns.of(np.array([other, many], dtype=np.int32), table)
    assert len(columns.end_ids) <= MOST_END_IDS
    no_limits = np.full(2, 100, dtype=np.int32)
    for token in (4, 5, 9, 10, 9 + num_ends, 10 + num_ends):
        tokens = np.full(2, token, dtype=np.int32)
        found = find_ends(tokens, columns.end_ids, np.ones(2, dtype=np.int32), no_limits, columns.many_end_ids)
        assert found.tolist() == ([0] if token == 5 else [1] if 10 <= token < 10 + num_ends else [])
    assert RowColumns.of(np.array([other], dtype=np.int32), table).many_end_ids == ()
