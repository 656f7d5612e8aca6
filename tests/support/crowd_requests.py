"""Random requests for an engine over a tiny model: every way of sampling, beams, grammars and images."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from family_models import VOCAB
from fuzz_grammars import REAL_GRAMMARS
from quire.types.decoding import BeamRules
from quire.types.images import PromptImage
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from vision_models import Picture, picture, prompt_of

FIRST = 4  # token ids from here on have no special meaning
LAST = 90  # and those before here are not for images
ADAPTER = "adapter"
GRAMMAR_ENDS = (3, 50)  # what ends an answer that follows a grammar
TOYS = ("aa", "bbbb", "c")


@dataclass(frozen=True)
class Asked:
    """One request of the crowd."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    beam: int = 0
    end_ids: tuple[int, ...] = ()
    adapter: str = ""
    images: tuple[PromptImage, ...] = ()
    grammar: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    others: tuple[tuple[str, Any], ...] = ()  # further fields of the request

    def submit(self) -> Submit:
        sampling = SamplingParams(**{"temperature": 0.0, **self.sampling})
        breakers = (7, 30) if "extra" in self.sampling else ()
        return Submit(
            self.name,
            tuple(self.prompt),  # type: ignore[arg-type]
            sampling,
            TokenRules(self.end_ids, self.bad_words, grammar=self.grammar, dry_breakers=breakers),
            beam=BeamRules(self.beam) if self.beam else None,
            adapter=self.adapter,
            images=self.images,
            **dict(self.others),
        )


@dataclass(frozen=True)
class CrowdKind:
    """What the requests of a crowd may ask for."""

    has_adapter: bool = False
    has_grammars: bool = False
    has_priorities: bool = False
    pictures: tuple[tuple[int, int], ...] = ()  # the shapes of images, in tokens; (): no images
    row_ends: tuple[int, ...] = ()


def random_requests(rng: random.Random, kind: CrowdKind) -> Iterator[Asked]:
    """Make requests with prompts of a common stem or of repeated tokens, every way of sampling, and beams."""
    stem = rng.choices(range(FIRST, LAST), k=30)
    for number in range(rng.randint(4, 12)):
        prompt = stem[: rng.randint(0, 30)] + rng.choices(range(FIRST, LAST), k=rng.randint(1, 25))
        prompt = prompt[:8] * 3 if rng.random() < 0.25 else prompt
        images: tuple[PromptImage, ...] = ()
        if kind.pictures and rng.random() < 0.6:
            prompt, images = _with_images(rng, prompt, kind)
        beam = rng.choice([2, 3]) if rng.random() < 0.12 else 0
        sampling = {"max_tokens": rng.randint(2, 10), "n": beam} if beam else _random_sampling(rng)
        if not images and rng.random() < 0.4:  # a short prompt and a long answer: sequences that grow are preempted
            prompt, sampling = prompt[-6:], sampling | {"max_tokens": 45}
        if "prompt_logprobs_start" in sampling:
            sampling["prompt_logprobs_start"] = min(sampling["prompt_logprobs_start"], len(prompt))
        end_ids = tuple(rng.choices(range(FIRST, LAST), k=2)) if rng.random() < 0.4 else ()
        adapter = ADAPTER if kind.has_adapter and rng.random() < 0.5 else ""
        grammar = rng.choice([*REAL_GRAMMARS, *TOYS]) if kind.has_grammars and rng.random() < 0.5 else ""
        if grammar:
            end_ids = GRAMMAR_ENDS
            sampling = {name: value for name, value in sampling.items() if name != "allowed_token_ids"}
        bad_words = ((rng.randrange(VOCAB),), tuple(rng.choices(range(VOCAB), k=2))) if rng.random() < 0.15 else ()
        others: dict[str, Any] = {"priority": rng.randint(-2, 2)} if kind.has_priorities else {}
        if rng.random() < 0.1:
            others["cache_salt"] = rng.choice("ab")
        others["tenant"] = rng.choice(["", "x", "y"])
        yield Asked(
            f"r{number}", prompt, sampling, beam, end_ids, adapter, images, grammar, () if grammar else bad_words,
            tuple(others.items()),
        )  # fmt: skip


def _with_images(rng: random.Random, prompt: list[int], kind: CrowdKind) -> tuple[list[int], tuple[PromptImage, ...]]:
    """One or two pictures of a few, between parts of the prompt."""
    cut = rng.randint(1, len(prompt))
    parts: list[Picture | list[int]] = [prompt[:cut][:10]]
    for _ in range(rng.choice([1, 1, 2])):
        parts += [picture(*rng.choice(kind.pictures), seed=rng.randrange(3)), rng.choices(range(FIRST, LAST), k=2)]
    made = prompt_of(*parts, prompt[cut:][:8], row_ends=kind.row_ends)
    return made.tokens, made.images


def _random_sampling(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, 20)
    chosen: dict[str, Any] = {"max_tokens": count, "logprobs": rng.randint(0, 4)}
    if rng.random() < 0.15:
        chosen["prompt_logprobs"] = rng.randint(0, 3)
        if rng.random() < 0.5:
            chosen["prompt_logprobs_start"] = rng.randint(0, 9)
    if rng.random() < 0.2:
        chosen["extra"] = rng.choice([{"no_repeat_ngram_size": rng.randint(1, 3)}, _dry(rng)])
    if rng.random() < 0.4:
        return chosen
    chosen |= {"temperature": rng.choice([0.5, 0.9, 1.3]), "seed": rng.randrange(1000)}
    chosen |= rng.choice([{}, {"n": rng.randint(2, 4)}, {"n": 2, "best_of": 3}])
    possible = {
        "top_k": rng.randint(1, 30), "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.7,
        "frequency_penalty": 0.4, "logit_bias": {rng.randrange(VOCAB): 3.0}, "min_tokens": rng.randint(0, count),
        "logprob_token_ids": [3, 50], "allowed_token_ids": rng.sample(range(VOCAB), 40), "extra": _random_extra(rng),
    }  # fmt: skip
    return chosen | {name: value for name, value in possible.items() if rng.random() < 0.2}


def _dry(rng: random.Random) -> dict[str, Any]:
    length, last = rng.randint(1, 3), rng.choice([-1, 5, 40])
    return {"dry_multiplier": 0.8, "dry_allowed_length": length, "dry_penalty_last_n": last}


def _random_extra(rng: random.Random) -> dict[str, Any]:
    possible: list[dict[str, Any]] = [
        {"typical_p": 0.7}, {"top_a": 0.2}, {"top_n_sigma": 1.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"dynatemp_range": 0.4, "dynatemp_exponent": 1.5}, {"no_repeat_ngram_size": 2}, _dry(rng),
    ]  # fmt: skip
    chosen: dict[str, Any] = {}
    for each in rng.sample(possible, rng.randint(1, 3)):
        chosen |= each
    return chosen
