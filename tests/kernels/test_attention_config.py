"""How decode attention is run, by the size of a step."""

from __future__ import annotations

import pytest
import torch

from attention_cases import DTYPES, FLOAT8, Heads, close, paged, rule_for
from quire.kernels.triton.attention_config import SplitConfig, decode_configs, prefill_config, split_config
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_schedule import allocate_split_plan, fill_split_plan, with_config
from triton_cases import DEVICE

CPU = torch.device("cpu")  # counts as four processors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FLOAT8])
@pytest.mark.parametrize("kv", [1, 2, 8])
@pytest.mark.parametrize("most", [1, 3, 64])
def test_configs_cover_every_number_of_rows_in_order(dtype: torch.dtype, kv: int, most: int) -> None:
    found = decode_configs((4 * kv, kv), 128, dtype, CPU, most)
    limits = [limit for limit, _ in found]
    assert limits == sorted(set(limits))
    assert limits[-1] == most
    for rows in range(1, most + 1):
        config = next(config for limit, config in found if rows <= limit)
        assert config == split_config(4, 128, dtype, CPU, rows * kv)


def test_few_pairs_take_larger_tiles_by_fewer_programs() -> None:
    (few, small), *_, (_, large) = decode_configs((4, 1), 128, torch.bfloat16, CPU, 64)
    assert few == 1  # of four processors, a quarter of a pair each
    assert small.programs < large.programs
    assert small.block_n > large.block_n


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FLOAT8])
@pytest.mark.parametrize("group", [1, 8, 9, 16])
def test_a_tile_holds_all_query_heads_of_a_group(dtype: torch.dtype, group: int) -> None:
    for _, config in decode_configs((2 * group, 2), 128, dtype, CPU, 64):
        assert group <= config.block_m
        assert config.swap_ab or config.block_m == 16  # gemms without swapped operands have at least sixteen rows


@pytest.mark.parametrize(("dim", "swap_ab"), [(16, False), (32, True), (64, True)])
def test_heads_too_small_for_swapped_operands_keep_them(dim: int, swap_ab: bool) -> None:
    for _, config in decode_configs((4, 2), dim, FLOAT8, CPU, 64):
        assert config.swap_ab == swap_ab


def test_large_heads_take_small_tiles() -> None:
    """Queries, keys and values of a processor's programs fit into its shared memory, in as many stages as the compiler
    keeps: one less than it is told for rows that decode."""
    for dtype in (torch.bfloat16, FLOAT8, torch.float32):
        for rows in (1, 8, 16, 32):
            config = split_config(rows, 512, dtype, CPU)
            size = max(2, dtype.itemsize)  # float8 is multiplied in float16
            room = (config.block_m + 2 * max(1, config.stages - 1) * config.block_n) * 512 * size
            assert room * (config.programs // 4) <= 226 << 10
            assert rows <= config.block_m
        tile = prefill_config(512, dtype, CPU)
        assert (tile.block_m + 2 * tile.stages * tile.block_n) * 512 * size <= 226 << 10


def test_plans_of_several_configs_share_their_memory() -> None:
    heads = Heads(4, 2, 16)
    case = paged([70, 9, 33], heads, 4, DTYPES[0])
    memory = allocate_split_plan(case.key_cache, heads.query, 4, config=SplitConfig(16, 16, 4, 3, 9, 1))
    query, rule, lengths = case.queries(3), rule_for(heads), torch.tensor(case.lengths, device=DEVICE)
    for config in (memory.config, SplitConfig(16, 32, 4, 2, 3, 1), memory.config):
        plan = with_config(memory, config)
        assert plan.parts.data_ptr() == memory.parts.data_ptr()
        fill_split_plan(plan, lengths)
        out = paged_decode(query, case.key_cache, case.value_cache, case.tables, plan, rule)
        for row, length in enumerate(case.lengths):
            close(out[row : row + 1], case.expected(query[row : row + 1], row, length - 1, rule))
    with pytest.raises(ValueError, match="no room"):
        with_config(memory, SplitConfig(16, 16, 4, 3, 10, 1))
