"""Images whose tokens see the whole image (Gemma 3 and 4) in the engine: no chunk and no prefix hit cuts one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.tiers import TierConfig
from quire.config.vision import ImageGrid, ImageLimits
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.request import Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules
from vision_models import IMAGE, UNIT, VisionPrompt, picture, prompt_of, vision_model, vision_reference
from worker_executor import TinyEngine

pytest.importorskip("transformers")
COUNT = 6
ONE = prompt_of([5, 9, 11], picture(4, 4), [7, 30, 8])
TWO = prompt_of([6], picture(4, 4, 1), picture(4, 4, 2), [13])
TEXT = prompt_of([4, 4, 17, 3, 8])
GRID = ImageGrid(IMAGE, UNIT, 32 * 32, 32 * 32, fixed=4, is_whole=True)
LIMITS = ImageLimits(GRID, max_images=3, max_kept_tokens=0)


class Case:
    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.model = folder, vision_model(folder, family)
        self._answers: dict[tuple[object, ...], list[int]] = {}

    def expected(self, prompt: VisionPrompt, count: int = COUNT) -> list[int]:
        key = (count, *prompt.tokens, *(image.key for image in prompt.images))
        if key not in self._answers:
            self._answers[key] = vision_reference(self.model, prompt, count)[0]
        return self._answers[key]

    def engine(self, **settings: Any) -> TinyEngine:
        settings = {"images": LIMITS, "max_len": 128, **settings}
        return TinyEngine(open_checkpoint(files_at(self.folder)), None, **settings)


@pytest.fixture(scope="module", params=["gemma3", "gemma4_large"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def request(name: str, prompt: VisionPrompt, **sampling: Any) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, **sampling})
    return Submit(name, tuple(prompt.tokens), params, TokenRules(), images=prompt.images)  # type: ignore[arg-type]


def answers(made: TinyEngine, *prompts: VisionPrompt, count: int = COUNT) -> list[list[int]]:
    names = [f"{number} {len(made.finished)}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        made.core.submit(request(name, prompt, max_tokens=count))
    made.run()
    assert [made.finished[name].error for name in names] == [None] * len(names)
    return [list(made.finished[name].samples[0].token_ids) for name in names]


def cut_images(made: TinyEngine) -> list[object]:
    """The chunks that begin or end inside an image."""
    by_row: dict[int, Any] = {}
    found: list[object] = []
    for plan in made.executor.plans:
        by_row |= {new.row: new.images for new in plan.new_rows}
        found += [
            chunk
            for chunk in plan.chunks
            for image in by_row[chunk.row]
            for edge in (chunk.start, chunk.start + chunk.num_tokens)
            if image.start < edge < image.end
        ]
    return found


@pytest.mark.parametrize("budget", [2_048, 17, 20, 23])
def test_chunks_end_at_the_edges_of_images(case: Case, budget: int) -> None:
    made = case.engine(budget=budget)
    assert answers(made, ONE, TEXT, TWO) == [case.expected(ONE), case.expected(TEXT), case.expected(TWO)]
    assert cut_images(made) == []


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_hits_end_at_the_edges_of_images(case: Case, block_size: int) -> None:
    made = case.engine(block_size=block_size, num_blocks=256)
    other = prompt_of([6], picture(4, 4, 1), picture(4, 4, 3), [13])
    assert answers(made, TWO) == [case.expected(TWO)]
    assert answers(made, TWO, other) == [case.expected(TWO), case.expected(other)]
    ends = VisionPrompt(TWO.tokens[: TWO.images[1].end], TWO.images, TWO.pictures)  # its last token is never reused
    assert answers(made, ends) == [case.expected(ends)]
    assert cut_images(made) == []
    if block_size < 4:
        assert made.core.stats().prompt_tokens < 4 * len(TWO.tokens)


@pytest.mark.parametrize("tiers", [TierConfig(), TierConfig(host_blocks=64)])
def test_preempted_requests_go_on_as_if_nothing_was(case: Case, tiers: TierConfig) -> None:
    made = case.engine(num_blocks=18, block_size=4, tiers=tiers)
    others = [prompt_of([seed + 3], picture(4, 4, seed), [seed + 5]) for seed in range(4)]
    assert answers(made, *others, count=40) == [case.expected(other, 40) for other in others]
    assert made.core.stats().preemptions > 0
    assert cut_images(made) == []


def test_a_branch_that_ends_with_an_image_computes_all_of_it(case: Case) -> None:
    made = case.engine()
    made.core.submit(request("first", TWO))
    made.core.step()
    ends = VisionPrompt(TWO.tokens[: TWO.images[1].end], TWO.images, TWO.pictures)
    source = Branch("first", 0, len(ends.tokens))
    made.core.submit(replace(request("branch", ends), source=source))
    made.run()
    assert list(made.finished["branch"].samples[0].token_ids) == case.expected(ends)
    assert cut_images(made) == []


def steps_until_finished(made: TinyEngine, name: str, each: Callable[[int], None]) -> int:
    """Step until a request has finished. `each` is called before each step. Fails after 40 steps."""
    for step in range(40):
        each(step)
        out = made.core.step()
        made.core.check()
        if any(message.request_id == name for message in out.finished):
            return step
    raise AssertionError(f"{name!r} has not finished after 40 steps")


def test_a_stream_of_short_prompts_does_not_keep_an_image_waiting(case: Case) -> None:
    made = case.engine(budget=20, rows=4)

    def submit_short(step: int) -> None:
        for number in range(3):
            made.core.submit(request(f"{step} {number}", prompt_of([4, 17, number + 3, step + 3]), max_tokens=1))
        if not step:
            made.core.submit(request("image", ONE, max_tokens=1))

    assert steps_until_finished(made, "image", submit_short) < 6
    assert cut_images(made) == []


def test_a_policy_that_bounds_steps_while_others_decode_does_not_keep_an_image_waiting(case: Case) -> None:
    made = case.engine(budget=20, rows=4)
    policy: Any = made.core._scheduler.policy
    policy.budget = lambda limit, view: min(limit, view.num_decoding + 4)
    made.core.submit(request("text", TEXT, max_tokens=100))
    made.core.step()
    made.core.submit(request("image", ONE, max_tokens=1))
    assert steps_until_finished(made, "image", lambda _: None) < 6
    assert cut_images(made) == []
