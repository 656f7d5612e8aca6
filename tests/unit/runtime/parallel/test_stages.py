"""A pipeline stage: what it builds and loads, what it keeps of rows, and when it waits for the tokens of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gloo_stage_main
from local_ranks import run_ranks
from quire.config.kv_cache import KVGroups
from quire.config.model import MtpHead
from quire.config.parallel import ParallelConfig
from quire.config.stages import heaviest_stage, join_groups, stage_models
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.weights import weight_layers
from quire.runtime.loading.weights import load_weights
from quire.runtime.models.build import build_model, count_weights
from quire.runtime.worker.worker import Worker
from quire.types.errors import ModelLoadError
from quire.types.step import StepPlan
from staged_executor import make_workers
from staged_plans import CHECKPOINT, CONFIG, PLANS, decode_plan, prompt_plan
from tiny_models import GreedySampler, engine_config, random_checkpoint, tiny_config

TIED = random_checkpoint(tiny_config(num_layers=4, tie_word_embeddings=True))


def names_of(config: Any) -> set[str]:
    device = engine_config().device
    model = build_model(config, LayerBuilder(device, config.heads))
    return {name for _, parts in weight_layers(model) for name in parts}


# ------------------------------------------------------------------------------------------------------------ models
def test_every_tensor_is_loaded_by_one_stage_and_only_its_bytes_are_read() -> None:
    read = []
    for config in stage_models(CHECKPOINT.config, 3):
        model = build_model(config, LayerBuilder(engine_config().device, config.heads))
        checkpoint = replace(CHECKPOINT, reads=[])
        load_weights(model, checkpoint)
        assert set(checkpoint.reads) == names_of(config)
        read += checkpoint.reads
    assert sorted(read) == sorted(CHECKPOINT.tensors)


def test_the_first_stage_has_the_embedding_and_the_last_one_norm_and_head() -> None:
    first, middle, last = map(names_of, stage_models(CHECKPOINT.config, 3))
    outer = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert first & outer == {"model.embed_tokens.weight"}
    assert middle & outer == set()
    assert last & outer == {"model.norm.weight", "lm_head.weight"}
    assert {name.split(".")[2] for name in first - outer} == {"0", "1"}


def test_with_a_tied_head_the_first_and_last_stage_have_the_table() -> None:
    first, middle, last = map(names_of, stage_models(TIED.config, 3))
    assert "model.embed_tokens.weight" in first & last
    assert "model.embed_tokens.weight" not in middle


def test_for_a_draft_head_the_last_stage_has_the_embedding_too_and_the_plan_counts_it() -> None:
    model, head = count_weights(CHECKPOINT.config), replace(CHECKPOINT.config, num_layers=1, mtp=MtpHead("mtp."))
    stages = stage_models(model, 3, head)
    assert ["model.embed_tokens.weight" in names_of(stage) for stage in stages] == [True, False, True]
    for stage in stages:
        assert stage.weights.parameters == pytest.approx(count_weights(stage).weights.parameters, rel=0.01)
    assert stage_models(model, 3, model) == stage_models(model, 3)  # a whole draft model has its own


def test_a_tensor_that_only_another_stage_loads_must_be_there() -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    checkpoint = replace(CHECKPOINT, tensors={key: value for key, value in CHECKPOINT.tensors.items() if key != name})
    config = stage_models(CHECKPOINT.config, 2)[0]
    with pytest.raises(ModelLoadError, match="layers.3.mlp.up_proj"):
        load_weights(build_model(config, LayerBuilder(engine_config().device, config.heads)), checkpoint)


def test_weights_are_counted_by_stage() -> None:
    whole = count_weights(CHECKPOINT.config).weights
    stages = [count_weights(config).weights for config in stage_models(CHECKPOINT.config, 2)]
    assert sum(each.parameters for each in stages) == whole.parameters
    assert [each.in_blocks for each in stages] == [whole.in_blocks // 2] * 2


def test_the_memory_plan_knows_the_weights_of_the_heaviest_stage() -> None:
    model = count_weights(tiny_config(num_layers=5, tie_word_embeddings=True))
    estimated = stage_models(model, 2)
    counted = [count_weights(config).weights for config in estimated]
    for config, exact in zip(estimated, counted, strict=True):
        assert config.weights.parameters == pytest.approx(exact.parameters, rel=0.01)
        assert config.weights.in_blocks == exact.in_blocks
    assert heaviest_stage(estimated) is estimated[0]  # three of five layers


def test_a_stage_keeps_the_keys_of_its_own_layers() -> None:
    config = replace(engine_config(), parallel=ParallelConfig(pipeline=3))
    workers = make_workers(CHECKPOINT, config, 3)
    assert [len(worker.cache.layers) for worker in workers] == [2, 1, 1]
    assert [worker.cache.blocks.shape[0] for worker in workers] == [4, 2, 2]  # keys and values


def test_stages_agree_on_window_blocks_or_have_none() -> None:
    windows = (8, None, 8, 8, 8, None)
    model = tiny_config(num_layers=6, windows=windows)
    groups = KVGroups(8, 2)
    assert join_groups(stage_models(model, 2), "float32", 4, groups) == KVGroups(8, 2)
    assert join_groups(stage_models(model, 6), "float32", 4, groups) == KVGroups()
    assert join_groups(stage_models(model, 1), "float32", 4, groups) == groups


# ------------------------------------------------------------------------------------------------------------- tokens
def run_plans(plans: list[StepPlan], num_stages: int, note: Callable[[int, int, int], None]) -> list[list[int]]:
    """All stages run all plans, each as fast as it can. Returns the tokens of every plan. `note` is told the stage, the
    step that it is about to run, and how many steps' tokens it awaits."""
    config = replace(CONFIG, parallel=ParallelConfig(pipeline=num_stages))
    workers = make_workers(CHECKPOINT, config, num_stages, GreedySampler())

    def obey(group: Any) -> list[list[int]]:
        worker, found = workers[group.index], []
        for plan in plans:
            found.append(worker.execute(plan).token_ids.tolist())
            awaited = worker._awaited
            note(group.index, plan.step, 0 if awaited is None else len(awaited))
        worker.check()
        return found

    return run_ranks(num_stages, obey)[-1]


def alone(plans: list[StepPlan]) -> list[list[int]]:
    config = CONFIG
    builder = LayerBuilder(config.device, CHECKPOINT.config.heads, CONFIG.cache.block_size)
    model = build_model(CHECKPOINT.config, builder)
    load_weights(model, CHECKPOINT)
    worker = Worker(model, builder.backend, GreedySampler(), CHECKPOINT.config, config)
    return [worker.execute(plan).token_ids.tolist() for plan in plans]


MICRO_BATCHES = PLANS[:6]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_plans_of_two_micro_batches_give_the_tokens_of_one_worker(num_stages: int) -> None:
    assert run_plans(MICRO_BATCHES, num_stages, lambda *_: None) == alone(MICRO_BATCHES)


def test_a_stage_runs_a_plan_before_the_tokens_of_another_micro_batch_have_come() -> None:
    noted: dict[tuple[int, int], int] = {}
    run_plans(MICRO_BATCHES, 2, lambda stage, step, awaited: noted.update({(stage, step): awaited}))
    # Behind each step its own tokens are awaited, and those of the step before, which has other rows.
    assert [noted[0, step] for step in range(6)] == [1, 2, 2, 2, 2, 2]
    assert [noted[1, step] for step in range(6)] == [0] * 6


def test_a_plan_of_the_same_rows_waits_for_their_tokens() -> None:
    plans = [prompt_plan(0, 0), decode_plan(1, 0), decode_plan(2, 0)]
    noted: dict[tuple[int, int], int] = {}
    assert run_plans(plans, 3, lambda stage, step, awaited: noted.update({(stage, step): awaited})) == alone(plans)
    assert [noted[0, step] for step in range(3)] == [1, 1, 1]


def test_tokens_that_come_for_a_row_after_its_release_are_dropped() -> None:
    """The row has another sequence already."""
    plans = [prompt_plan(0, 0, 1), prompt_plan(1, 0, released=(0,)), decode_plan(2, 1), decode_plan(3, 0)]
    assert run_plans(plans, 2, lambda *_: None) == alone(plans)


def test_guided_plans_sample_on_the_last_stage() -> None:
    config = replace(CONFIG, parallel=ParallelConfig(pipeline=2))
    workers = make_workers(CHECKPOINT, config, 2, GreedySampler())
    guided = [replace(plan, guided=True) for plan in MICRO_BATCHES[:4]]

    def obey(group: Any) -> list[list[int]]:
        worker, found = workers[group.index], []
        for plan in guided:
            worker.begin(plan)
            found.append(worker.supply_masks(None).token_ids.tolist())
        worker.check()
        return found

    others, last = run_ranks(2, obey)
    assert last == alone(MICRO_BATCHES[:4])
    assert others == [[]] * 4


def test_processes_over_gloo_give_the_tokens_of_one_worker(tmp_path: Path) -> None:
    """The first stage sends hidden states while the last one sends tokens back: neither waits for the other."""
    main, environment = Path(gloo_stage_main.__file__), {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(main.parent), *sys.path])
    commands = [[sys.executable, str(main), stage, "2", str(tmp_path / "store")] for stage in "01"]
    stages = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for command in commands]
    try:
        said = [stage.communicate(timeout=300)[0] for stage in stages]
    finally:
        for stage in stages:
            stage.kill()
    assert [stage.returncode for stage in stages] == [0, 0]
    assert json.loads(said[-1].strip().splitlines()[-1]) == alone(PLANS)
