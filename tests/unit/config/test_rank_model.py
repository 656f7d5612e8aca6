"""What one of several ranks that share a model holds of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.engine import DeviceConfig
from quire.config.memory import kv_block_bytes
from quire.config.model import MXFP4, Experts, Heads
from quire.config.mxfp4 import mxfp4_experts
from quire.config.parallel import NO_PARALLEL, ParallelConfig, share_size
from quire.config.rank_model import check_shares, largest_rank, rank_model
from quire.config.recurrent import Recurrent
from quire.config.weight_counts import StoredLevels
from quire.runtime.models.build import count_rank_weights
from quire.types.errors import ConfigError
from tiny_models import tiny_config


def test_a_rank_has_its_heads_and_its_part_of_intermediate_sizes() -> None:
    experts = Experts(4, 2, 256, shared_size=64)
    recurrent = Recurrent(key_heads=2, value_heads=4, key_dim=8, value_dim=8, width=4, layers=(0,))
    model = replace(
        tiny_config(heads=Heads(9, 3, 8), intermediate_size=384), experts=experts, recurrent=recurrent
    )  # fmt: skip
    first, second = (rank_model(model, ParallelConfig(tensor=2).place(rank)) for rank in range(2))
    assert (first.heads, second.heads) == (Heads(6, 2, 8), Heads(3, 1, 8))
    assert (first.intermediate_size, second.intermediate_size) == (192, 192)
    assert first.experts is not None
    assert (first.experts.size, first.experts.shared_size, first.experts.num) == (128, 32, 4)
    assert first.recurrent is not None
    assert (first.recurrent.key_heads, first.recurrent.value_heads) == (1, 2)
    assert rank_model(model, NO_PARALLEL.place(0)) is model


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [48, 97, 1_000, 5_120, 49_152, 151_936])
def test_shares_of_a_size_are_all_of_it_and_nearly_equal(count: int, size: int) -> None:
    shares = [share_size(count, index, size) for index in range(size)]
    assert [number for share in shares for number in share] == list(range(count))
    assert len(shares[0]) - len(shares[-1]) <= max(1, count // (8 * size))
    if count >= 5_120:
        assert all(share.start % 64 == 0 for share in shares)


@pytest.mark.parametrize(("count", "size"), [(2_880, 8), (2_880, 16), (352, 2)])
def test_shares_are_of_whole_groups_of_quantized_weights_though_some_are_larger(count: int, size: int) -> None:
    shares = [share_size(count, index, size) for index in range(size)]
    assert [number for share in shares for number in share] == list(range(count))
    assert all(share.start % 32 == len(share) % 32 == 0 for share in shares)
    assert len(shares[0]) <= 1.1 * count / size


@pytest.mark.parametrize(("size", "kept"), [(352, 3), (96, 2)])
def test_memory_is_planned_for_experts_that_a_rank_must_expand(size: int, kept: int) -> None:
    """Shares of 48 are no whole groups of MXFP4: of three matrices the one behind the gate is expanded."""
    model = replace(tiny_config(), hidden_size=64, experts=Experts(4, 2, size), quantization=MXFP4)
    model = replace(model, levels=mxfp4_experts(model))
    rank = largest_rank(model, ParallelConfig(tensor=2))
    assert model.levels.gpu_parameters == 3 * model.num_layers * 4 * model.hidden_size * size
    assert rank.experts is not None
    assert rank.levels.gpu_parameters == kept * model.num_layers * 4 * model.hidden_size * rank.experts.size


def test_memory_is_planned_for_the_rank_that_holds_most() -> None:
    model, parallel = tiny_config(heads=Heads(9, 3, 8)), ParallelConfig(tensor=2)
    assert largest_rank(model, parallel).heads == Heads(6, 2, 8)
    assert kv_block_bytes(largest_rank(model, parallel), "float32", 4) * 3 == 2 * kv_block_bytes(model, "float32", 4)
    counted = largest_rank(count_rank_weights(model, parallel), parallel).weights
    assert model.weights.parameters / 2 < counted.parameters < model.weights.parameters
    bound = largest_rank(model, parallel).weights  # where nobody counted
    assert all(getattr(bound, name) >= getattr(counted, name) for name in ("parameters", "in_blocks", "block_outputs"))


def test_ranks_without_a_head_are_refused_with_the_most_that_can_be() -> None:
    with pytest.raises(ConfigError, match=r"7 ranks cannot share 6 query heads.*6 or less"):
        check_shares(tiny_config(), ParallelConfig(tensor=7), "float32")
    check_shares(tiny_config(), ParallelConfig(tensor=6), "float32")


def test_a_rank_with_whole_experts_has_their_whole_size() -> None:
    model = replace(tiny_config(), experts=Experts(5, 2, 256, shared_size=64))
    parallel = ParallelConfig(tensor=2, expert=True)
    assert rank_model(model, parallel.place(0)).experts == Experts(5, 2, 256, shared_size=32, held=3)
    check_shares(replace(model, experts=Experts(5, 2, 1)), parallel, "float32")  # which ranks could not cut


def test_more_ranks_than_experts_are_refused() -> None:
    model = tiny_config("mixtral", experts=Experts(3, 2, 64))
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 6 ranks cannot share 3 experts.*3 or less"):
        check_shares(model, ParallelConfig(tensor=6, expert=True), "float32")
    check_shares(model, ParallelConfig(tensor=3, expert=True), "float32")
    check_shares(model, ParallelConfig(tensor=6), "float32")


def test_memory_is_planned_for_the_rank_with_most_experts() -> None:
    model, parallel = tiny_config("mixtral", experts=Experts(3, 2, 640)), ParallelConfig(tensor=2, expert=True)
    counted = largest_rank(count_rank_weights(model, parallel), parallel).weights
    assert counted.parameters == pytest.approx(model.weights.parameters * 2 / 3, rel=0.05)  # two of three experts
    bound = largest_rank(model, parallel).weights
    assert all(getattr(bound, name) >= getattr(counted, name) for name in ("parameters", "in_blocks"))
    rank = largest_rank(count_rank_weights(model, parallel), parallel)
    assert rank.num_active == pytest.approx(model.num_active * 2 / 3, rel=0.05)
    stored = replace(model, levels=StoredLevels(parameters=900, num_bytes=600, integer_bytes=660))
    levels = largest_rank(count_rank_weights(stored, parallel), parallel).levels
    assert levels.num_bytes == pytest.approx(400, rel=0.05)
    assert levels.integer_bytes == pytest.approx(440, rel=0.05)


def test_heads_of_two_kinds_must_be_divided_alike() -> None:
    model = replace(
        tiny_config(heads=Heads(6, 2, 32)), local_heads=Heads(6, 3, 16), windows=(5, None, 5)
    )  # fmt: skip
    with pytest.raises(ConfigError, match="two kinds of heads"):
        check_shares(model, ParallelConfig(tensor=2), DeviceConfig("cpu", "float32", "float32").kv_dtype)
