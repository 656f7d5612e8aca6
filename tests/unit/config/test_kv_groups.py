"""Blocks of layers with a window: how many a sequence takes, when there are any, and what the plan says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.arguments import EngineArguments
from quire.config.kv_cache import PLAIN, KVCacheSpec, KVGroups, KVLayout, Place, can_split, lay_out
from quire.config.memory import MemoryPlan, kv_block_bytes
from quire.config.model import Heads, ModelConfig
from quire.config.resolve import resolve_engine_config
from quire.config.sizes import GIB, format_size
from quire.types.errors import ConfigError, DoesNotFit
from tests.unit.config.machines import LAPTOP, LARGE, SERVER, SMALL

GEMMA = replace(SMALL, windows=((512,) * 5 + (None,)) * 5)  # 25 layers with a window, 5 without
MIXED = KVGroups(512, 5)


def resolved(model: ModelConfig = GEMMA, **settings: object) -> tuple[KVGroups, MemoryPlan]:
    config, plan = resolve_engine_config(EngineArguments(**settings), LAPTOP, model)  # type: ignore[arg-type]
    assert config.cache.groups == plan.groups
    return config.cache.groups, plan


def test_a_short_sequence_takes_window_blocks_for_all_of_its_blocks_and_a_long_one_for_what_it_sees() -> None:
    groups = KVGroups(512, 5)
    assert groups.blocks_needed(3, 16, 512) == 3 + 5 * 3
    assert groups.blocks_needed(10_000, 16, 512) == 10_000 + 5 * (64 + 1)
    assert groups.blocks_needed(10_000, 16, 513) == 10_000 + 5 * (65 + 1)
    assert PLAIN.blocks_needed(10_000, 16, 512) == 10_000


@pytest.mark.parametrize("groups", [PLAIN, KVGroups(5, 1), KVGroups(40, 3), KVGroups(40)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_what_blocks_hold_is_the_most_that_does_not_need_more(groups: KVGroups, block_size: int) -> None:
    for num_blocks in range(200):
        held = groups.blocks_held(num_blocks, block_size, 9)
        assert groups.blocks_needed(held, block_size, 9) <= num_blocks
        is_any = groups.all_windows and num_blocks >= groups.blocks_needed(1 << 20, block_size, 9)
        assert is_any or groups.blocks_needed(held + 1, block_size, 9) > num_blocks


def test_a_model_of_windows_alone_takes_no_more_than_these() -> None:
    mistral = replace(SMALL, windows=(512,) * SMALL.num_layers)
    groups, plan = resolved(mistral, num_kv_blocks=100)
    assert groups == KVGroups(512)
    assert plan.blocks_per_sequence == -(-(512 + plan.max_chunk) // 16) + 1
    assert plan.max_model_len == 8_192  # of which 100 blocks hold 1,600
    lines = str(resolved(mistral, num_kv_blocks=130, max_num_batched_tokens=512)[1]).splitlines()
    assert lines[-1] == "  each takes up to 65 blocks, for all layers that see 512"
    guide = (Path(__file__).parents[3] / "docs/guides/memory.md").read_text()
    assert all(f"    {line.strip()}\n" in guide for line in lines[-2:])
    assert kv_block_bytes(mistral, "float32", 16, groups) == kv_block_bytes(mistral, "float32", 16)
    with pytest.raises(DoesNotFit, match=r"8192 tokens need 65 KV blocks of 16, the cache has 64.*to 1024 or less"):
        resolved(mistral, num_kv_blocks=64, max_model_len=8_192)
    assert resolved(mistral, max_model_len=512)[0] == PLAIN
    assert lay_out(mistral.kv_specs, split=True).sources == (0,)


@pytest.mark.parametrize("split", [True, False])
def test_layers_with_chunks_read_a_table_of_their_own_even_in_the_same_blocks(split: bool) -> None:
    model = replace(SMALL, windows=((512,) * 5 + (None,)) * 5, has_chunks=True)
    assert resolved(model)[0] == KVGroups(512, 5, is_chunked=True)
    layout = lay_out(model.kv_specs, split=split)
    assert layout.sources == ((0, 1, 2, 3, 4, 5) if split else (0, 0))
    assert layout.chunks == (None, *[512] * (len(layout.sources) - 1))
    everywhere = lay_out(replace(model, windows=(512,) * SMALL.num_layers).kv_specs, split=split)
    assert (everywhere.sources, everywhere.chunks) == ((0,), (512,))


def test_keys_of_indexers_share_planes_after_those_of_latents() -> None:
    sizes = [16, 0, 16, 16, 0]
    layout = lay_out([KVCacheSpec("latent", 40, unit=40, index=size) for size in sizes], split=True)
    assert (layout.num_planes, layout.numbers, layout.index) == (5 + 2, 40, 16)
    assert [place and (place.plane, place.part) for place in layout.index_places] == [
        (5, 0),
        None,
        (5, 1),
        (6, 0),
        None,
    ]
    assert [place.plane for place in layout.places] == [0, 1, 2, 3, 4]


def test_chunks_are_whole_blocks() -> None:
    model = replace(SMALL, windows=(96,) * SMALL.num_layers, has_chunks=True)
    assert resolved(model, block_size=32)[0].is_chunked
    with pytest.raises(ConfigError, match=r"block_size: is 64, .*chunks of 96 tokens.*set it to 16"):
        resolved(model, block_size=64)


def test_layers_with_a_window_get_blocks_of_their_own() -> None:
    groups, plan = resolved()
    assert groups == MIXED
    assert kv_block_bytes(GEMMA, "float32", 16, groups) * 6 == kv_block_bytes(GEMMA, "float32", 16)
    assert plan.blocks_per_sequence == groups.blocks_needed(8_192 // 16, 16, plan.max_chunk)


def test_more_and_longer_sequences_fit_into_the_same_memory() -> None:
    _, plan = resolved(kv_cache_memory="1GiB")
    _, whole = resolved(replace(GEMMA, windows=()), kv_cache_memory="1GiB")
    assert plan.num_sequences > 1.5 * whole.num_sequences
    assert plan.rows > whole.rows


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 512},
        {"policy": "static"},
        {"kv_layout": "virtual", "block_size": 64},
        {"attention_backend": "flashinfer"},
        {"speculative_config": {"method": "self_draft"}},
    ],
)
def test_there_is_one_group_where_nothing_is_saved_or_somebody_cannot_follow(settings: dict[str, object]) -> None:
    assert resolved(**settings)[0] == PLAIN


def test_ngram_drafts_change_nothing() -> None:
    assert resolved(speculative_config={"method": "ngram"})[0] == MIXED


@pytest.mark.parametrize("windows", [(), (512,) * 9 + (None,) * 21])
def test_models_with_one_kind_of_layers_or_few_windows_have_one_group(windows: tuple[int | None, ...]) -> None:
    assert resolved(replace(GEMMA, windows=windows))[0] == PLAIN


def test_a_draft_model_keeps_its_keys_in_blocks_of_the_same_layers() -> None:
    settings = EngineArguments(speculative_config={"model": "d"})
    config, _ = resolve_engine_config(settings, SERVER, GEMMA, GEMMA)
    assert config.cache.groups == PLAIN


def test_the_plan_says_in_one_line_what_serves_which_layers() -> None:
    _, plan = resolved(max_num_batched_tokens=512, num_kv_blocks=4_000)
    lines = str(plan).splitlines()
    assert lines[-1] == (
        "  each takes 512 blocks for the layers that see all tokens and up to 325 for the layers that see 512"
    )
    assert "holds 4.8 sequences of 8,192 tokens" in lines[-2]
    guide = (Path(__file__).parents[3] / "docs/guides/memory.md").read_text()
    assert all(f"    {line.strip()}\n" in guide for line in lines[-2:])


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_sizes_that_do() -> None:
    settings = {"max_num_batched_tokens": 512, "max_model_len": 8_192}
    with pytest.raises(
        DoesNotFit, match=r"need 837 KV blocks of 16, 325 of them window blocks, .*set.* to 2800 or .* to 837 "
    ):
        resolved(**settings, num_kv_blocks=500)
    assert resolved(**{**settings, "max_model_len": 2_800}, num_kv_blocks=500)[1].num_sequences >= 1
    assert resolved(**settings, num_kv_blocks=837)[1].num_sequences == 1


def test_a_cache_beside_states_is_refused_with_what_the_states_take() -> None:
    _, plan = resolved(max_num_batched_tokens=512, num_kv_blocks=4_000)
    hybrid = replace(plan, groups=KVGroups(num_states=8, blocks_per_state=2), num_blocks=100)
    with pytest.raises(DoesNotFit, match="need 512 KV blocks of 16, the cache has 100") as refused:
        hybrid.check()
    assert f"beside {format_size(16 * plan.block_bytes)} for states" in str(refused.value)


def test_the_longest_sequence_is_what_the_given_blocks_hold() -> None:
    _, plan = resolved(max_num_batched_tokens=512, num_kv_blocks=500)
    assert plan.max_model_len == 2_800
    assert plan.blocks_per_sequence == 500


def test_blocks_that_hold_no_token_in_all_layers_are_refused_with_the_number_that_does() -> None:
    with pytest.raises(DoesNotFit, match=r"16 tokens need 6 KV blocks.*has 5.*raise num_kv_blocks to 6"):
        resolved(num_kv_blocks=5)
    assert resolved(num_kv_blocks=6)[1].max_model_len == 16


def test_what_does_not_fit_beside_the_rest_is_refused_with_a_length_that_does() -> None:
    facts = replace(LAPTOP, available_memory=2 * GIB)
    model = replace(LARGE, num_layers=2, windows=(4_096, None), weights=SMALL.weights)
    settings = {"max_model_len": 131_072, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    with pytest.raises(DoesNotFit, match=r"max_model_len.*lower it to (\d+) or less") as refused:
        resolve_engine_config(EngineArguments(**settings), facts, model)  # type: ignore[arg-type]
    length = int(str(refused.value).partition("lower it to ")[2].split()[0])
    config, _ = resolve_engine_config(EngineArguments(**{**settings, "max_model_len": length}), facts, model)  # type: ignore[arg-type]
    assert config.cache.groups == KVGroups(4_096, 1)


# Heads of published models: those of layers that see all keep twice as much of a token, or half as much.
SMALL_HEADS = replace(GEMMA, heads=Heads(8, 1, 512), local_heads=Heads(8, 1, 256), windows=((512,) * 4 + (None,)) * 6)
LARGE_HEADS = replace(
    GEMMA, heads=Heads(32, 4, 512), local_heads=Heads(32, 16, 256), num_layers=60, windows=((512,) * 5 + (None,)) * 10
)


def in_planes(layout: KVLayout, numbers: list[int]) -> list[list[tuple[int, int]]]:
    """For each plane of a block and of its window blocks, the first number and the end of every layer that is in it."""
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, each in zip(layout.places, numbers, strict=True):
        plane = (layout.sources[place.table], place.plane)
        taken.setdefault(plane, []).append((place.part * each, (place.part + 1) * each))
    return [sorted(spans) for spans in taken.values()]


@pytest.mark.parametrize("model", [SMALL_HEADS, LARGE_HEADS])
@pytest.mark.parametrize("split", [False, True])
def test_layers_of_unequal_heads_share_planes_without_a_gap(model: ModelConfig, split: bool) -> None:
    specs = model.kv_specs
    layout = lay_out(specs, split=split)
    for spans in in_planes(layout, [spec.numbers for spec in specs]):
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == layout.numbers
    assert layout.sources == ((0, 0) if not split else tuple(range(1 + layout.num_window_blocks)))


def test_a_block_has_the_bytes_of_what_layers_keep() -> None:
    full, window = 2 * 512, 2 * 256
    assert kv_block_bytes(SMALL_HEADS, "bfloat16", 16) == (6 * full + 24 * window) * 2 * 16
    groups, plan = resolved(SMALL_HEADS)
    assert groups == KVGroups(512, 2)  # two of them in a plane: twelve in a window block of six planes
    assert kv_block_bytes(SMALL_HEADS, "bfloat16", 16, groups) == 6 * full * 2 * 16
    assert plan.kv_cache >= plan.num_blocks * 6 * full * 4 * 16
    groups, _ = resolved(LARGE_HEADS)
    assert groups == KVGroups(512, 10)  # of 50 layers, five in a window block
    assert kv_block_bytes(LARGE_HEADS, "bfloat16", 16, groups) == 10 * 2 * 4 * 512 * 2 * 16


def test_layers_that_read_the_keys_of_others_take_no_memory() -> None:
    shared = replace(SMALL_HEADS, kv_layers=(*range(15), *((13,) * 4 + (14,)) * 3))
    assert kv_block_bytes(shared, "bfloat16", 16) == (3 * 2 * 512 + 12 * 2 * 256) * 2 * 16
    assert resolved(shared)[0] == KVGroups(512, 2)
    assert [shared.place_of(layer) for layer in (0, 13, 14)] == [0, 13, 14]


def test_planes_hold_whole_heads_of_all_layers() -> None:
    full, window = KVCacheSpec("full", 2 * 3 * 40, unit=80), KVCacheSpec("window", 2 * 3 * 16, 9, unit=32)
    layout = lay_out([full, window, window], split=True)
    assert layout.numbers == 320  # 240, in multiples of 80 and 32
    assert layout.places == (Place(0, 0), Place(0, 1), Place(0, 1, 1))


def test_windows_that_would_leave_most_of_their_blocks_empty_have_none() -> None:
    full, window = KVCacheSpec("full", 64, unit=32), KVCacheSpec("window", 32, 9, unit=16)
    assert can_split([full, window])
    assert not can_split([full, full, window])
    assert lay_out([full, full, window], split=True).window is None
