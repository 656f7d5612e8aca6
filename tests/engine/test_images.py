"""Requests with images through the whole engine, over a real worker: what is cached, budgets, preemption, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.tiers import TierConfig
from quire.config.vision import ImageLimits
from quire.engine.speculation.draft_length import DraftLength
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.models.build import count_weights
from quire.runtime.models.mtp import head_config
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import family_checkpoint
from vision_models import IMAGE, VISION, VisionPrompt, picture, prompt_of, vision_model, vision_reference
from worker_executor import TinyEngine

pytest.importorskip("transformers")
COUNT = 8
ONE = prompt_of([5, 9, 11], picture(3, 5), [7, 30, 8])
TEXT = prompt_of([4, 4, 17, 3, 8])
TWO = prompt_of([6], picture(2, 2, 1), [12, 40], picture(4, 3, 2), [13])
LIMITS = ImageLimits(VISION.grid, max_images=3, max_encoded_tokens=2_048, max_kept_tokens=0)


class Case:
    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.model, self.is_recurrent = folder, vision_model(folder, family), family == "qwen3_5"
        self.has_windows = family == "gemma4"
        self._answers: dict[tuple[object, ...], list[int]] = {}

    def expected(self, prompt: VisionPrompt) -> list[int]:
        key = (*prompt.tokens, *(image.key for image in prompt.images))
        if key not in self._answers:
            self._answers[key] = vision_reference(self.model, prompt, COUNT)[0]
        return self._answers[key]

    def engine(self, speculative: dict[str, Any] | None = None, **settings: Any) -> TinyEngine:
        settings = {"images": LIMITS, "max_len": 128, **settings}
        return TinyEngine(open_checkpoint(files_at(self.folder)), speculative, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("vision"), request.param)


def request(name: str, prompt: VisionPrompt, **sampling: Any) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, **sampling})
    return Submit(name, tuple(prompt.tokens), params, TokenRules(), images=prompt.images)  # type: ignore[arg-type]


def answers(made: TinyEngine, *prompts: VisionPrompt, **sampling: Any) -> list[list[int]]:
    names = [f"{number} {len(made.finished)}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        made.core.submit(request(name, prompt, **sampling))
    made.run()
    assert [made.finished[name].error for name in names] == [None] * len(names)
    return [list(made.finished[name].samples[0].token_ids) for name in names]


def num_encoded(made: TinyEngine) -> int:
    images = made.executor.worker._images
    assert images is not None
    return images.num_encoded


@pytest.mark.parametrize("budget", [2_048, 7])
def test_answers_are_those_of_transformers(case: Case, budget: int) -> None:
    made = case.engine(budget=budget)
    assert answers(made, ONE, TEXT, TWO) == [case.expected(ONE), case.expected(TEXT), case.expected(TWO)]


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_the_same_image_is_found_in_the_cache_and_another_never(case: Case, block_size: int) -> None:
    made = case.engine(block_size=block_size, num_blocks=256)
    assert answers(made, ONE) == [case.expected(ONE)]
    before = made.core.stats().prompt_tokens
    assert answers(made, ONE) == [case.expected(ONE)]
    again = made.core.stats().prompt_tokens - before
    assert again < block_size + 2  # all but its last tokens was cached
    assert num_encoded(made) == 1 + (len(ONE.tokens) - again < ONE.images[0].end)
    other = prompt_of([5, 9, 11], picture(3, 5, 77), [7, 30, 8])
    before = made.core.stats().prompt_tokens
    assert answers(made, other) == [case.expected(other)]
    assert made.core.stats().prompt_tokens - before >= len(other.tokens) - other.images[0].start


def test_a_hit_never_ends_where_the_keys_of_an_image_tell_little_of_it(case: Case) -> None:
    """The first tokens of another image have the same keys by accident: 31 bits do not tell images apart."""
    made = case.engine(block_size=2, num_blocks=256)
    answers(made, ONE)
    group_prompt = request("", ONE).key_tokens
    other = prompt_of([5, 9, 11], picture(3, 5, 77), [7, 30, 8])

    start = other.images[0].start
    for matching in (1, 2, 3):
        submitted = request(f"forged {matching}", other)
        forged = group_prompt[: 4 * (start + matching)] + submitted.key_tokens[4 * (start + matching) :]
        made.core.submit(submitted)
        (group,) = made.core._groups.values()
        group.prompt, group.hit = forged, None
        before = made.core.stats().prompt_tokens
        made.run()
        assert list(made.finished[f"forged {matching}"].samples[0].token_ids) == case.expected(other)
        assert made.core.stats().prompt_tokens - before >= len(other.tokens) - start
        made.core.reset_cache()
        answers(made, ONE)


@pytest.mark.parametrize("tiers", [TierConfig(), TierConfig(host_blocks=64)])
def test_preempted_requests_with_images_go_on_as_if_nothing_was(case: Case, tiers: TierConfig) -> None:
    made = case.engine(num_blocks=11 if case.has_windows else 16, tiers=tiers)
    others = [prompt_of([seed + 3], picture(2, 4, seed), [seed + 5]) for seed in range(4)]
    assert answers(made, *others) == [case.expected(other) for other in others]
    assert made.core.stats().preemptions > 0


def test_a_step_encodes_no_more_images_than_it_may_and_one_always(case: Case) -> None:
    limits = replace(LIMITS, max_encoded_tokens=8)
    made = case.engine(images=limits)
    small = [prompt_of([seed + 3], picture(2, 3, seed), [seed + 5]) for seed in range(3)]
    found = answers(made, *small, ONE)  # images of 6, 6, 6 and 15 tokens
    assert found == [case.expected(prompt) for prompt in (*small, ONE)]
    encoded = []
    prompts = {(new.row, plan.step): new for plan in made.executor.plans for new in plan.new_rows}
    by_row: dict[int, Any] = {}
    for plan in made.executor.plans:
        by_row |= {new.row: new for (row, step), new in prompts.items() if step == plan.step and row == new.row}
        first = [
            image.num_tokens
            for chunk in plan.chunks
            for image in by_row[chunk.row].images
            if chunk.start <= image.start < chunk.start + chunk.num_tokens
        ]
        encoded += [first] if first else []
    assert encoded == [[6], [6], [6], [15]]
    assert num_encoded(made) == 4


def test_samples_beams_and_branches_share_the_image(case: Case) -> None:
    made = case.engine()
    made.core.submit(request("samples", ONE, n=3, temperature=0.7, seed=3))
    beams = replace(request("beams", ONE, n=2), beam=BeamRules(2))
    made.core.submit(beams)
    made.run()
    assert len({sample.token_ids for sample in made.finished["samples"].samples}) > 1
    again = case.engine(block_size=3)
    again.core.submit(beams)
    again.run()
    tokens = [[sample.token_ids for sample in each.finished["beams"].samples] for each in (made, again)]
    assert tokens[0] == tokens[1]
    made.core.submit(request("first", ONE))
    made.core.step()
    said = case.expected(ONE)[:1]
    prompt = (*ONE.tokens, *said)
    branch = replace(request("branch", ONE), prompt_token_ids=prompt, source=Branch("first", 0, len(ONE.tokens)))  # type: ignore[arg-type]
    made.core.submit(branch)
    made.run()
    assert list(made.finished["branch"].samples[0].token_ids)[: COUNT - 1] == case.expected(ONE)[1:]


@pytest.mark.parametrize(
    "method",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"method": "self_draft", "num_layers": 2, "num_speculative_tokens": 3},
    ],
)
def test_drafts_change_nothing(case: Case, method: dict[str, Any]) -> None:
    if method["method"] == "self_draft" and case.is_recurrent:
        pytest.skip("the state of recurrent layers cannot go back to before a rejected draft")
    made = case.engine(method)
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    assert answers(made, ONE, TWO) == [case.expected(ONE), case.expected(TWO)]


def test_drafts_by_the_models_own_head_change_nothing(tmp_path: Path) -> None:
    """The head sees the placeholders of images."""
    case = Case(tmp_path, "qwen3_5")
    head = family_checkpoint(count_weights(head_config(open_checkpoint(files_at(tmp_path)).config)))
    made = case.engine({"method": "mtp"}, draft=head)
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    assert answers(made, ONE, TWO) == [case.expected(ONE), case.expected(TWO)]
    assert made.core.stats().drafted_tokens > 0


def test_a_prompt_with_an_image_can_stay_resident(case: Case) -> None:
    made = case.engine()
    made.core.submit(replace(request("pin", ONE, max_tokens=1), pin="picture"))
    made.run()
    assert [pin.num_tokens for pin in made.core.pins.listing()] == [len(ONE.tokens)]
    longer = prompt_of([5, 9, 11], picture(3, 5), [7, 30, 8, 21])
    before = made.core.stats().prompt_tokens
    assert answers(made, longer) == [case.expected(longer)]
    if not (case.is_recurrent or case.has_windows):  # states and windows are kept at few positions
        assert made.core.stats().prompt_tokens - before == 1


@pytest.mark.parametrize("budget", [2_048, 12])
def test_the_blocks_of_a_request_that_fails_hold_its_image(
    case: Case, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Others that show the same image read them before the failure is known."""
    made = case.engine(block_size=2, num_blocks=256, budget=budget, depth=2)
    sampler = made.executor.worker._sampler
    add, failing = sampler.add, ["bad"]

    def add_but_the_first(new: Any) -> None:
        if failing:
            raise ValueError(failing.pop())
        add(new)

    monkeypatch.setattr(sampler, "add", add_but_the_first)
    made.core.submit(request("bad", ONE))
    made.core.submit(request("good", ONE))
    made.run()
    assert made.finished["bad"].error == "bad"
    if not case.is_recurrent:  # the states of a request that failed are not kept
        assert made.finished["good"].num_cached_tokens > ONE.images[0].start
    assert list(made.finished["good"].samples[0].token_ids) == case.expected(ONE)


def _change(**changes: Any) -> Callable[[Submit], Submit]:
    return lambda given: replace(given, images=(replace(given.images[0], **changes),))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda given: replace(given, images=given.images * 4), "images"),
        (lambda given: replace(given, images=given.images * 2), "images"),
        (lambda given: replace(given, images=()), "prompt"),
        (lambda given: replace(given, prompt_token_ids=[*given.prompt_token_ids, IMAGE]), "prompt"),
        (_change(start=3), "prompt"),
        (_change(start=10), "prompt"),
        (_change(rows=1, columns=3), "images"),
        (_change(rows=-3, columns=-5), "images"),
        (_change(rows=300, columns=300), "images"),
        (_change(pixels=b""), "images"),
        (_change(key=b""), "images"),
    ],
)
def test_what_does_not_fit_the_prompt_is_refused(case: Case, change: Callable[[Submit], Submit], field: str) -> None:
    made = case.engine()
    with pytest.raises(InvalidRequest) as error:
        made.core.submit(change(request("wrong", ONE)))
    assert error.value.field == field
    assert answers(made, TEXT) == [case.expected(TEXT)]


def test_an_engine_for_text_refuses_images(case: Case) -> None:
    made = case.engine(images=None)
    with pytest.raises(InvalidRequest, match="text only"):
        made.core.submit(request("image", ONE))
