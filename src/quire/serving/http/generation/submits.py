"""Makes the engine requests of one HTTP request: one per prompt, tokenized and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.engine.submission import tokens_that_fit
from quire.serving.http.generation.admission_checks import (
    check_admission,
    check_length,
    check_texts,
    cut,
    length_excess,
)
from quire.serving.http.generation.sampling_fields import with_api_field
from quire.serving.http.generation.settings import GenerationSettings, Origin, Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.process.link import EngineReady
from quire.serving.requests import Prompt
from quire.serving.text.stop_strings import StopStrings
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams

SHORTEST_ANSWER = 256  # tokens to which an answer without max_tokens may be limited by its size; below, it is refused


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine requests of all prompts of a request have in common."""

    settings: GenerationSettings
    given: Parameters
    sampling: SamplingParams
    beam: BeamRules | None = None
    origin: Origin | None = None  # of a fork
    adapter: str = ""  # name of a LoRA adapter; empty: none
    can_cut: bool = True  # whether the endpoint has a field for cutting prompts

    @property
    def prompt_field(self) -> str:
        """The name of the field that the prompt came in."""
        name: str = self.given.get("prompt_field", self.settings.prompt_field)
        return name

    @property
    def count(self) -> int:
        """How many sequences run at once for one prompt."""
        return self.sampling.num_sequences if self.beam is None else self.beam.width


def make_submits(
    service: Service, work: Work, prompts: Sequence[Prompt], head: RequestHead
) -> tuple[list[Submit], list[str]]:
    """Tokenize the prompts and return one engine request per prompt, and warnings about answers that were shortened to
    fit. Raises InvalidRequest for requests that the engine would refuse."""
    engine, given, sampling = service.engine(), work.given, work.sampling
    _check_count(work, len(prompts), service.limits["choices"])
    placed = _tokenize(service, engine, work, prompts)
    token_ids = [ids for ids, _ in placed]
    StopStrings(sampling.stops)  # raises here, not later on the link's thread
    rules = service.texts.maker(engine.eos_ids).rules(sampling, check=False)
    salt = head.salt(given.get("cache_salt", "")) if work.origin is None else work.origin.salt
    source = None if work.origin is None else work.origin.branch
    names = head.engine_ids(work.settings.id_prefix, given.get("request_id"), len(token_ids))
    priority = given.get("priority", 0)
    excess = [length_excess(given, len(ids), engine.max_model_len) for ids in token_ids]
    too_long = [error for error in excess if error is not None]
    if too_long and head.strict:
        raise too_long[0]
    submits = [
        Submit(
            name,
            pack_tokens(ids),
            _cut_to_room(sampling, len(ids), engine),
            rules,
            priority,
            salt,
            work.beam,
            source,
            head.principal,
            images=images,
            adapter=work.adapter,
        )
        for name, (ids, images) in zip(names, placed, strict=True)
    ]
    submits = [_within_answer_size(submit, engine) for submit in submits]
    try:
        check_admission(engine, submits, head.num_calls)
    except InvalidRequest as error:
        raise with_api_field(error, given) from None
    named = [work.settings.in_own_names(error) for error in too_long[:1]]
    return submits, [f"{error.field}: {error.reason}; the answer is cut there" for error in named]


def _cut_to_room(sampling: SamplingParams, num_tokens: int, engine: EngineReady) -> SamplingParams:
    """Return the sampling parameters with max_tokens lowered to what fits after a prompt of this length."""
    room = engine.max_model_len - num_tokens
    return sampling if (sampling.max_tokens or 0) <= room else replace(sampling, max_tokens=room)


def _within_answer_size(submit: Submit, engine: EngineReady) -> Submit:
    """Return the request with max_tokens lowered, if it was not given, to what fits into an answer. Logprobs can make
    that less than max_model_len."""
    sampling, room = submit.sampling, engine.max_model_len - len(submit.prompt_token_ids)
    fits = tokens_that_fit(submit, engine.vocab_size)
    if sampling.max_tokens is not None or not max(sampling.min_tokens, SHORTEST_ANSWER) <= fits < room:
        return submit
    return replace(submit, sampling=replace(sampling, max_tokens=fits))


def _check_count(work: Work, num_prompts: int, limit: int) -> None:
    if work.count * num_prompts > limit:
        reason = f"is {work.count} for {num_prompts} prompts, which makes more than {limit} answers"
        field = "n" if work.count == work.sampling.n else "best_of"
        raise InvalidRequest(field, reason, "send fewer prompts at once")


def _tokenize(
    service: Service, engine: EngineReady, work: Work, prompts: Sequence[Prompt]
) -> list[tuple[tuple[int, ...], tuple[PromptImage, ...]]]:
    """Return the token ids of every prompt, with placeholders for its images, and the images."""
    given, field = work.given, work.prompt_field
    if "truncate_prompt_tokens" not in given:
        check_texts(service, field, prompts, engine.max_model_len, can_cut=work.can_cut)
    add_special = given.get("add_special_tokens", work.settings.adds_special_tokens)
    encoded = service.texts.maker(engine.eos_ids).tokenize(prompts, add_special)
    placed = [
        _place(field, given, prompt, ids, engine, is_placed=work.origin is not None)
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]
    token_ids = [cut(ids, given, work.sampling, engine) for ids, _ in placed]
    for place, ids in enumerate(token_ids):
        where = f"{field}[{place}]" if len(token_ids) > 1 else field
        check_length(where, len(ids), engine.max_model_len, can_cut=work.can_cut)
    total = sum(map(len, token_ids))
    if total > service.limits["prompt_tokens"]:
        reason = f"has {total} tokens in all, limit {service.limits['prompt_tokens']}"
        raise InvalidRequest(field, reason, "send fewer at once")
    return [(ids, images) for ids, (_, images) in zip(token_ids, placed, strict=True)]


def _place(
    field: str, given: Parameters, prompt: Prompt, ids: tuple[int, ...], engine: EngineReady, *, is_placed: bool
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Return the token ids with placeholders for all tokens of the prompt's images, and the images."""
    if not prompt.images or is_placed:
        return ids, prompt.images
    if "truncate_prompt_tokens" in given:
        reason = "is not supported for a prompt with images, which cannot be cut"
        raise InvalidRequest("truncate_prompt_tokens", reason, "leave it out")
    from quire.serving.vision.image_reader import place_images  # not imported unless there are images

    assert engine.images is not None, "images are taken only where the engine has limits for them"
    return place_images(field, ids, prompt.images, engine.images.grid)
