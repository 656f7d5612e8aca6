"""Rows that begin with the same blocks are grouped where that saves most; attention gets groups when they change."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.attention_cascade import SharedPrefix
from quire.runtime.worker.device_rows import DeviceRows
from quire.runtime.worker.shared_prefixes import LEAST_TOKENS, SharedPrefixes, find_groups
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Ints, NewRow
from tiny_models import DEVICE

SIZE = 16


def tables_of(*tables: list[int]) -> Ints:
    padded = np.zeros((len(tables), max(map(len, tables)) + 2), dtype=np.int32)
    for row, blocks in enumerate(tables):
        padded[row, : len(blocks)] = blocks
    return padded


def find(tables: Ints, lengths: list[int], rows: list[int] | None = None, **more: int) -> list[SharedPrefix]:
    which = np.array(range(len(lengths)) if rows is None else rows, dtype=np.int32)
    limits = {"rows_per_unit": 16, "least_saved": 1} | more
    return find_groups(tables, which, np.array(lengths), SIZE, **limits)


def found(groups: list[SharedPrefix]) -> set[tuple[frozenset[int], int]]:
    return {(frozenset(group.rows), group.num_tokens) for group in groups}


def test_rows_that_share_nothing_are_in_no_group() -> None:
    assert find(tables_of([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), [80, 80]) == []
    assert find(tables_of([1, 2, 3, 4, 5]), [80]) == []
    assert find(tables_of([1]), []) == []


def test_rows_that_begin_with_the_same_blocks_are_a_group_of_step_indices() -> None:
    tables = tables_of([9] * 6, [1, 2, 3, 4, 5, 6], [8] * 6, [1, 2, 3, 4, 5, 7])
    groups = find(tables, [96, 90, 96], rows=[3, 1, 0])
    assert found(groups) == {(frozenset({0, 1}), 80)}
    assert groups[0].table_row in (1, 3)


def test_only_full_blocks_before_the_newest_token_of_every_member_count() -> None:
    tables = tables_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert found(find(tables, [96, 96])) == {(frozenset({0, 1}), 80)}  # the sixth holds the newest token
    assert found(find(tables, [97, 97])) == {(frozenset({0, 1}), 96)}
    assert found(find(tables, [97, 65])) == {(frozenset({0, 1}), 64)}
    assert find(tables, [97, 64]) == []  # three blocks are less than LEAST_TOKENS
    assert LEAST_TOKENS == 64


def test_stale_entries_of_an_earlier_sequence_in_a_table_are_ignored() -> None:
    tables = tables_of([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 7])
    assert found(find(tables, [110, 110, 3])) == {(frozenset({0, 1}), 96)}


def test_of_nested_groups_those_that_save_most_are_chosen() -> None:
    common = [1, 2, 3, 4]
    pairs = [common + [10 * pair + i for i in range(6)] + [99 + row] for pair in (1, 2) for row in range(2)]
    lengths = [177] * 4
    assert found(find(tables_of(*pairs), lengths)) == {(frozenset({0, 1}), 160), (frozenset({2, 3}), 160)}
    many = [common + [100 + row] * 7 for row in range(10)]
    tables = tables_of(*pairs, *many)
    assert found(find(tables, [177] * 14)) == {(frozenset(range(14)), 64)}


def test_an_equal_block_behind_different_blocks_is_not_shared() -> None:
    assert find(tables_of([1, 2, 3, 4, 5], [9, 2, 3, 4, 5]), [80, 80]) == []
    assert find(tables_of([1, 8, 3, 4, 5], [1, 2, 3, 4, 5]), [80, 80]) == []


def test_groups_that_save_too_little_are_dropped() -> None:
    tables, lengths = tables_of(*[[1, 2, 3, 4, 5 + row] for row in range(4)]), [70] * 4
    assert len(find(tables, lengths, least_saved=3 * 64)) == 1
    assert find(tables, lengths, least_saved=3 * 64 + 1) == []
    assert find(tables, lengths, rows_per_unit=2, least_saved=3 * 64) == []  # two units read it, not one
    assert find(tables, lengths, rows_per_unit=1) == []


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_random_trees_are_correct_and_disjoint(seed: int) -> None:
    rng = random.Random(seed)
    tables: list[list[int]] = [[rng.randrange(1000) for _ in range(12)]]
    for fresh in range(rng.randrange(1, 40)):
        cut = rng.choice([0, rng.randrange(12)])
        tables.append(rng.choice(tables)[:cut] + [1000 + 12 * fresh + i for i in range(12 - cut)])
    lengths = [rng.randrange(1, 12 * SIZE + 1) for _ in tables]
    rows = rng.sample(range(len(tables)), len(tables))
    groups = find(tables_of(*tables), [lengths[row] for row in rows], rows)
    members = [place for group in groups for place in group.rows]
    assert len(members) == len(set(members))
    for group in groups:
        held = tables[group.table_row][: group.num_tokens // SIZE]
        assert len(group.rows) > 1
        assert group.num_tokens % SIZE == 0
        assert group.table_row in {rows[place] for place in group.rows}
        for place in group.rows:
            assert tables[rows[place]][: len(held)] == held
            assert lengths[rows[place]] > group.num_tokens


class Told:
    """Stands in for attention, and remembers what it was told."""

    rows_per_unit, least_saved = 16, 1

    def __init__(self) -> None:
        self.calls: list[set[tuple[frozenset[int], int]]] = []

    def set_groups(self, groups: list[SharedPrefix]) -> None:
        self.calls.append(found(groups))


def place(rows: DeviceRows, row: int, blocks: tuple[int, ...]) -> None:
    tokens = np.zeros(len(blocks) * 4, dtype=np.int32)
    rows.place([NewRow(row, tokens, len(tokens), blocks, SamplingParams(), TokenRules(), sample_index=0, seed=0)])


def test_attention_gets_groups_only_when_they_change() -> None:
    rows, told = DeviceRows(4, 160, 4, torch.device(DEVICE)), Told()
    runs = SharedPrefixes(rows, told)  # type: ignore[arg-type]
    prefix = tuple(range(1, 21))
    for row in range(3):
        place(rows, row, (*prefix, 30 + row))
    first, second = np.array([0, 1, 2], dtype=np.int32), np.array([2, 0], dtype=np.int32)
    assert runs.update_groups(first)
    assert runs.update_groups(first.copy())
    assert runs.update_groups(second)
    assert told.calls == [{(frozenset({0, 1, 2}), 80)}, {(frozenset({0, 1}), 80)}]

    place(rows, 2, tuple(range(40, 61)))  # another sequence in the same row
    assert not runs.update_groups(second)
    assert told.calls[2:] == [set()]
    assert not runs.update_groups(np.array([0], dtype=np.int32))
    assert len(told.calls) == 3


class Begun:
    """Compilations that end when the test says so."""

    done = False

    def are_done(self) -> bool:
        return self.done


def test_no_groups_are_found_until_their_kernels_are_compiled() -> None:
    rows, told, kernels = DeviceRows(4, 160, 4, torch.device(DEVICE)), Told(), Begun()
    runs = SharedPrefixes(rows, told)  # type: ignore[arg-type]
    runs.await_kernels(kernels)  # type: ignore[arg-type]
    prefix, both = tuple(range(1, 21)), np.array([0, 1], dtype=np.int32)
    for row in range(2):
        place(rows, row, (*prefix, 30 + row))
    assert [runs.update_groups(both) for _ in range(2)] == [False, False]
    assert told.calls == []
    kernels.done = True
    assert [runs.update_groups(both) for _ in range(2)] == [True, True]
    assert told.calls == [{(frozenset({0, 1}), 80)}]
