"""Images over a pipeline: the first stage has the vision tower, all others place the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.stages import stage_models
from quire.config.tiers import TierConfig
from quire.config.vision import ImageLimits
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.models.build import count_weights
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from vision_models import VISION, VisionPrompt, picture, prompt_of, vision_model, vision_reference
from worker_executor import TinyEngine

pytest.importorskip("transformers")
COUNT = 8
ROW_ENDS = (94, 95)
FULL, SLIDING = "full_attention", "sliding_attention"
SIX: dict[str, Any] = {"num_hidden_layers": 6}
CHANGES: dict[str, dict[str, Any]] = {  # so that two stages have what they need
    "qwen2_5_vl": {},
    "qwen3_vl": SIX,  # two of three layers of the first stage add vectors of images
    "qwen3_5": {},
    "gemma3": SIX | {"layer_types": [SLIDING, SLIDING, FULL] * 2},  # images see all of themselves
    "gemma4": {"num_kv_shared_layers": 0},  # with inputs of each layer beside the stream
    "gemma4_large": {},
}
SQUARE = {"gemma3": [picture(4, 4, seed) for seed in range(3)]}
ODD = [picture(3, 5), picture(2, 2, 1), picture(4, 3, 2)]


class Case:
    def __init__(self, folder: Path, family: str) -> None:
        self._folder, self.family = folder, family
        self.model = vision_model(folder, family, changes=CHANGES[family])
        first, second, third = SQUARE.get(family, ODD)
        self.prompts = (
            prompt_of([5, 9, 11], first, [7, 30, 8]),
            prompt_of([4, 4, 17, 3, 8]),
            prompt_of([6], second, [12, 40], third, [13]),
        )
        self.expected = [vision_reference(self.model, prompt, COUNT)[0] for prompt in self.prompts]
        self.checkpoint: Any = open_checkpoint(files_at(folder))

    def engine(self, **settings: Any) -> TinyEngine:
        vision = self.checkpoint.config.vision
        limits = ImageLimits(vision.grid if self.family.startswith("gemma") else VISION.grid, 3, 2_048, 0)
        return TinyEngine(self.checkpoint, stages=2, images=limits, max_len=128, **settings)


@pytest.fixture(scope="module", params=CHANGES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("vision"), request.param)


def answers(made: TinyEngine, prompts: tuple[VisionPrompt, ...]) -> list[list[int]]:
    params, names = (
        SamplingParams(temperature=0.0, max_tokens=COUNT),
        [f"{each} {len(made.finished)}" for each in "abc"],
    )
    for name, prompt in zip(names, prompts, strict=True):
        made.core.submit(Submit(name, tuple(prompt.tokens), params, TokenRules(), images=prompt.images))
    made.run()
    assert [made.finished[name].error for name in names] == [None] * len(names)
    return [list(made.finished[name].samples[0].token_ids) for name in names]


@pytest.mark.parametrize("attention", ["gather", "native"])
def test_answers_are_those_of_transformers(case: Case, attention: str) -> None:
    is_whole = case.checkpoint.config.vision.grid.is_whole
    made = case.engine(attention=attention, budget=2_048 if is_whole else 7)
    try:
        assert answers(made, case.prompts) == case.expected
        assert answers(made, case.prompts) == case.expected  # from the cache of prefixes
        assert made.core.stats().prefix_hits > 0
        made.executor.check()
        first, last = (worker._images for worker in made.executor.workers)
        assert first.num_encoded >= 3
        assert (last._tower, last.num_encoded, last._vectors) == (None, 0, {})
    finally:
        made.executor.close()


def test_preempted_requests_with_images_go_on_as_if_nothing_was(case: Case) -> None:
    made = case.engine(num_blocks=14, block_size=4, tiers=TierConfig(host_blocks=64))
    if made.config.cache.groups.window is not None:
        made.executor.close()
        made = case.engine(num_blocks=24, block_size=4, tiers=TierConfig(host_blocks=64))
    try:
        assert answers(made, case.prompts) == case.expected
    finally:
        made.executor.close()


def test_only_the_first_stage_counts_and_loads_the_tower(case: Case) -> None:
    model = count_weights(case.checkpoint.config)
    tower = sum(
        parameter.numel() for name, parameter in case.model.named_parameters() if "visual" in name or "vision" in name
    )
    assert 0.5 * tower < model.weights.tower < 1.5 * tower
    first, last = stage_models(model, 2)
    assert last.weights.parameters < model.weights.parameters - model.weights.tower
    found = [count_weights(stage).weights.parameters for stage in (first, last)]
    assert first.weights.parameters >= 0.8 * found[0]
    assert last.weights.parameters >= 0.8 * found[1]
    made = case.engine()
    try:
        held = [worker._runner._model for worker in made.executor.workers]
        modules = [sum(isinstance(part, torch.nn.Module) for part in model.tower.modules()) for model in held]
        sizes = [sum(each.numel() for each in (*model.tower.parameters(), *model.tower.buffers())) for model in held]
        assert modules[1] > 0
        assert sizes[0] > sizes[1] == 0
    finally:
        made.executor.close()
