"""Who owns what among ranks."""

from __future__ import annotations

import pytest

from quire.config.parallel import ParallelConfig, share_heads, share_of


@pytest.mark.parametrize(
    ("count", "size", "multiple"), [(7, 2, 1), (8, 4, 1), (1536, 2, 64), (1500, 4, 128), (3, 4, 1)]
)
def test_shares_are_everything_once_and_begin_at_multiples(count: int, size: int, multiple: int) -> None:
    shares = [share_of(count, index, size, multiple) for index in range(size)]
    assert [one for share in shares for one in share] == list(range(count))
    assert all(share.start % multiple == 0 or not share for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= multiple


@pytest.mark.parametrize(("query", "kv", "size"), [(8, 8, 2), (9, 3, 2), (9, 3, 4), (8, 1, 2), (12, 4, 3), (16, 2, 8)])
def test_every_query_head_is_on_one_rank_beside_its_key_head(query: int, kv: int, size: int) -> None:
    shares = [share_heads(query, kv, index, size) for index in range(size)]
    assert [head for share in shares for head in share.query] == list(range(query))
    for share in shares:
        assert len(share.query) % len(share.kv) == 0, "kernels want equally many query heads for each key head"
        group = len(share.query) // len(share.kv)
        assert [share.kv[i // group] for i in range(len(share.query))] == [
            head // (query // kv) for head in share.query
        ]


def test_too_few_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads cannot be shared by 8 ranks"):
        share_heads(4, 2, 0, 8)


def test_ranks_of_a_stage_are_neighbours() -> None:
    config = ParallelConfig(tensor=2, pipeline=2)
    places = [config.place(rank) for rank in range(config.num_ranks)]
    assert [(place.shard, place.stage) for place in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [list(place.layers(5)) for place in places] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
