"""Reads prompts in all their forms and makes engine requests: tokenized, with bad words and grammars resolved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from operator import countOf
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict, TypeGuard, TypeVar

from quire.serving.process.grammar_check import GrammarChecker
from quire.serving.text.answer_grammar import plan_of
from quire.serving.text.token_search import TokenSearch
from quire.serving.text.tokenizer import Tokenizer
from quire.types.beam import BeamSearchParams
from quire.types.errors import InvalidRequest
from quire.types.grammar import CheckedGrammar
from quire.types.images import PromptImage, shown_together
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams, TokenRules

if TYPE_CHECKING:
    from quire.serving.vision.image_reader import ImageReader
    from quire.serving.vision.messages import ImageTaker


class TextPrompt(TypedDict):
    """A prompt as text. Prompts share cached prefixes only with prompts of the same `cache_salt`. `multi_modal_data`
    holds the PIL images of its placeholders: {"image": one, or a list}."""

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, object] | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is the text that outputs show for it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, object] | None]


PromptLike: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
Message: TypeAlias = Mapping[str, object]
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")
_Params = TypeVar("_Params", SamplingParams, BeamSearchParams)


@dataclass(slots=True)  # not frozen, to be made faster
class Prompt:
    """A prompt: text that is still to be tokenized, or token ids. Never changed after it is made."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""
    images: tuple[PromptImage, ...] = ()  # one for each placeholder, in order
    pictures: tuple[object, ...] = ()  # the same as PIL images, not yet preprocessed


def chat_prompt(taker: ImageTaker | None, text: str, images: tuple[PromptImage, ...]) -> Prompt:
    """Return the prompt of a rendered conversation. `taker`: read its images; None: the model takes none."""
    if not images:
        return Prompt(text=text)
    images = shown_together(images)
    return Prompt(text=text if taker is None else taker.with_replacements(text, images), images=images)


def read_prompts(prompts: PromptLike | Iterable[PromptLike]) -> list[Prompt]:
    """Read one prompt, or an iterable of them (generators too). A flat list of integers is one prompt of token ids.
    Arrays and tensors are converted to lists. Raises InvalidRequest."""
    prompts = _as_list(prompts)
    if _is_one_prompt(prompts):
        return [_read_prompt(prompts, "prompts")]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts", f"cannot be a {type(prompts).__name__}", "pass text, ids, or a list of them")
    return [_read_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def read_one_prompt(prompt: PromptLike) -> Prompt:
    """Read exactly one prompt. Raises InvalidRequest."""
    read = read_prompts(prompt)
    if len(read) != 1:
        raise InvalidRequest("prompt", f"are {len(read)} prompts", "pass one at a time")
    return read[0]


def refuse_salts(prompts: Sequence[Prompt]) -> None:
    """Raise InvalidRequest if a prompt has a cache salt. Called for models without a prefix cache."""
    for i, prompt in enumerate(prompts):
        if prompt.cache_salt:
            where = "prompts" if len(prompts) == 1 else f"prompts[{i}]"
            reason = f"of {where} has no effect: an encoder has no prefix cache"
            raise InvalidRequest("cache_salt", reason, "leave it out")


def pair_sampling(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, default: SamplingParams | None = None
) -> Sequence[SamplingParams]:
    """Return one SamplingParams for each prompt; `default` for all if None are given. Raises InvalidRequest."""
    chosen = (default or SamplingParams()) if params is None else params
    return _pair("sampling_params", SamplingParams, chosen, num_prompts)


def check_priorities(priority: object, num_prompts: int) -> None:
    """Raise InvalidRequest unless there is one priority for each prompt. None means equal priorities."""
    if priority is None:
        return
    if not isinstance(priority, Sequence) or isinstance(priority, str):
        raise InvalidRequest("priority", f"must be a list, got {type(priority).__name__}", "pass one number per prompt")
    if len(priority) != num_prompts:
        raise InvalidRequest("priority", f"has {len(priority)} entries for {num_prompts} prompts")


def pair_beams(params: BeamSearchParams | Sequence[BeamSearchParams], num_prompts: int) -> Sequence[BeamSearchParams]:
    """Return one BeamSearchParams for each prompt. Raises InvalidRequest."""
    return _pair("params", BeamSearchParams, params, num_prompts)


def _pair(name: str, kind: type[_Params], params: _Params | Sequence[_Params], num_prompts: int) -> Sequence[_Params]:
    if isinstance(params, kind):
        return [params] * num_prompts
    if not isinstance(params, list | tuple):
        reason = f"must be {kind.__name__}, got {type(params).__name__}"
        raise InvalidRequest(name, reason, f"pass {kind.__name__}, or a list of them")
    if len(params) != num_prompts:
        reason = f"has {len(params)} entries for {num_prompts} prompts"
        raise InvalidRequest(name, reason, "pass one, or one per prompt")
    for i, one in enumerate(params):
        if not isinstance(one, kind):
            raise InvalidRequest(f"{name}[{i}]", f"must be {kind.__name__}, got {type(one).__name__}")
    return params


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether the value is a list of messages rather than a prompt: its first item has a role."""
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], Mapping) and "role" in prompt[0]


def read_conversations(given: Iterable[Message] | Iterable[Sequence[Message]]) -> list[list[Message]]:
    """Read one conversation or several, from any iterable. Raises InvalidRequest."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequest("messages", "must be a list of messages", 'pass [{"role": "user", "content": "..."}]')
    messages = list(given)
    if not messages:
        return []
    if all(isinstance(message, Mapping) for message in messages):
        return [list(messages)]  # type: ignore[arg-type]
    for i, conversation in enumerate(messages):
        if isinstance(conversation, str) or not isinstance(conversation, Sequence) or not conversation:
            raise InvalidRequest(f"messages[{i}]", "must be a non-empty list of messages like the others")
    return [list(conversation) for conversation in messages]  # type: ignore[arg-type]


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, bytes | bytearray):
        return False
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], Integral)


def _as_list(given: Any) -> Any:
    """Convert a numpy array or a tensor to a list. Return anything else unchanged."""
    return given.tolist() if hasattr(given, "tolist") and not isinstance(given, memoryview) else given


def _read_prompt(prompt: object, where: str) -> Prompt:
    if type(prompt) is list or type(prompt) is tuple:  # before slower checks
        return Prompt(None, _read_ids(prompt, where))
    prompt = _as_list(prompt)
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, where)
    if isinstance(prompt, Sequence):
        return Prompt(token_ids=_read_ids(prompt, where))
    raise InvalidRequest(where, f"cannot be a {type(prompt).__name__}", "pass text or token ids")


def _read_mapping(prompt: Mapping[object, object], where: str) -> Prompt:
    for key, value in prompt.items():
        if key not in _PROMPT_KEYS and value is not None:
            fix = f"use {', '.join(_PROMPT_KEYS)}"
            raise InvalidRequest(f"{where}.{key}", "is not supported: prompts are text or token ids", fix)
    text, ids, salt, data = (prompt.get(key) for key in _PROMPT_KEYS)
    pictures = _read_pictures(data, f"{where}.multi_modal_data")
    for name, given in (("prompt", text), ("cache_salt", salt)):
        if given is not None and not isinstance(given, str):
            raise InvalidRequest(f"{where}.{name}", f"must be text, got {type(given).__name__}")
    cache_salt = str(salt or "")
    if ids is not None:
        ids = _as_list(ids)
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise InvalidRequest(f"{where}.prompt_token_ids", f"must be a list, got {type(ids).__name__}")
        read = _read_ids(ids, f"{where}.prompt_token_ids")
        return Prompt(_text_or_none(text), read, cache_salt, pictures=pictures)
    if text is None:
        raise InvalidRequest(where, 'has neither "prompt" nor "prompt_token_ids"', "give one")
    return Prompt(_text_or_none(text), cache_salt=cache_salt, pictures=pictures)


def _read_pictures(data: object, where: str) -> tuple[object, ...]:
    """Return the PIL images of a prompt's `multi_modal_data`, in vLLM's format. Raises InvalidRequest."""
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise InvalidRequest(where, f"must be an object, got {type(data).__name__}", 'pass {"image": image}')
    for key in data:
        if key != "image":
            raise InvalidRequest(f"{where}.{key}", "is not supported: only images are taken", 'pass {"image": image}')
    given = data.get("image")
    return () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)


def _text_or_none(text: object) -> str | None:
    return None if text is None else str(text)


def _read_ids(ids: Sequence[object], where: str) -> tuple[int, ...]:
    tokens = tuple(ids)
    if countOf(map(type, tokens), int) == len(tokens):  # nearly always true, and faster than the loop
        return tokens  # type: ignore[return-value]
    read = []
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidRequest(where, f"must hold token ids (whole numbers), got {token!r}")
        read.append(int(token))
    return tuple(read)


class RequestMaker:
    """Tokenizes prompts and makes numbered requests. Without a tokenizer, prompts must be token ids and sampling must
    not need text.

    The checker checks structured outputs. Without a checker they are refused, unless the caller has them checked.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, model_eos_ids: tuple[int, ...], checker: GrammarChecker | None = None
    ) -> None:
        self._tokenizer, self._checker = tokenizer, checker
        self.images: ImageReader | None = None  # set by the loader if the model takes images
        own = () if tokenizer is None else tokenizer.eos_ids
        self._eos_ids = tuple(dict.fromkeys((*own, *model_eos_ids)))
        self._numbers = itertools.count()
        self._token_search: TokenSearch | None = None
        self._plain_rules = {  # by ignore_eos: the rules of requests without stop tokens, bad words or grammar
            False: TokenRules(end_ids=self._eos_ids, eos_ids=self._eos_ids),
            True: TokenRules(),
        }

    def make(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        *,
        add_special_tokens: bool = True,
        priorities: Sequence[int] | None = None,
    ) -> list[Submit]:
        """Return one request for each prompt, in order. Raises InvalidRequest that names the refused prompt."""
        if priorities is not None and len(priorities) != len(prompts):
            raise InvalidRequest("priority", f"has {len(priorities)} entries for {len(prompts)} prompts")
        prompts = [self._with_pictures(prompt) if prompt.pictures else prompt for prompt in prompts]
        token_ids = self.tokenize(prompts, add_special_tokens)
        requests = self._text_requests(prompts, token_ids, sampling, priorities)
        if any(prompt.images for prompt in prompts):
            return [self._with_images(*pair) for pair in zip(requests, prompts, strict=True)]
        return requests

    def _with_pictures(self, prompt: Prompt) -> Prompt:
        """Return a prompt of `multi_modal_data` with its pictures read, as the model was trained on it."""
        if self.images is None:
            fix = "leave multi_modal_data out, or load a model with vision"
            raise InvalidRequest("multi_modal_data", "this model takes text only", fix)
        from quire.serving.vision.replacements import with_replacements  # imported late: only for prompts with images

        reader, field, images = self.images, "multi_modal_data.image", list[PromptImage]()
        budget = reader.make_budget()
        for picture in prompt.pictures:
            budget.add_one(field)
            images.append(reader.prepare(field, picture, budget))
        images = list(shown_together(images))
        text = None if prompt.text is None else with_replacements(prompt.text, reader.limits.grid, images)
        return replace(prompt, text=text, images=(*prompt.images, *images), pictures=())

    def _with_images(self, request: Submit, prompt: Prompt) -> Submit:
        """Return the request with its images, and with one placeholder token for each image token."""
        if not prompt.images:
            return request
        assert self.images is not None, "images are read only for a model that takes them"
        from quire.serving.vision.image_reader import place_images  # imported late, like `with_replacements`

        ids, placed = place_images("prompt", request.prompt_token_ids, prompt.images, self.images.limits.grid)
        return replace(request, prompt_token_ids=pack_tokens(ids), images=placed)

    def _text_requests(
        self,
        prompts: Sequence[Prompt],
        token_ids: Sequence[tuple[int, ...]],
        sampling: Sequence[SamplingParams],
        priorities: Sequence[int] | None,
    ) -> list[Submit]:
        rules = {id(params): self.rules(params) for params in sampling}
        return [
            Submit(str(next(self._numbers)), pack_tokens(ids), params, rules[id(params)], priority, prompt.cache_salt)
            for prompt, ids, params, priority in zip(
                prompts, token_ids, sampling, priorities or [0] * len(prompts), strict=True
            )
        ]

    def tokenize(self, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Return the token ids of every prompt. Prompts that are token ids are returned unchanged."""
        texts = [prompt.text for prompt in prompts if prompt.token_ids is None and prompt.text is not None]
        if texts and self._tokenizer is None:
            raise InvalidRequest("prompts", "are text, but there is no tokenizer", "pass token ids")
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens) if self._tokenizer and texts else ())
        return [tuple(next(encoded)) if prompt.token_ids is None else prompt.token_ids for prompt in prompts]

    def rules(self, params: SamplingParams, *, check: bool = True) -> TokenRules:
        """Return the token rules of a request: its stop tokens, bad words and grammar as token ids of this vocabulary.

        With `check`, its structured outputs are checked here, which may take a second. Without, the caller checks them
        and adds the grammar. Raises InvalidRequest.
        """
        rules = self._rules(params, check=check)
        if params.extra is not None and (extra := params.samplers) is not None and extra.uses_dry:
            return replace(rules, dry_breakers=self._breakers(extra.breakers))
        return rules

    def _breakers(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the tokens that contain one of DRY's sequence breakers."""
        if self._tokenizer is None and texts:
            fix = "send an empty list"
            raise InvalidRequest("dry_sequence_breakers", "needs text, but there is no tokenizer", fix)
        if self._tokenizer is None:
            return ()
        if self._token_search is None:
            self._token_search = TokenSearch(self._tokenizer)
        return self._token_search.ids_with(texts)

    def _rules(self, params: SamplingParams, *, check: bool) -> TokenRules:
        is_plain = params.structured_outputs is None and params.repetition_detection is None
        if is_plain and not (params.bad_words or params.stop_token_ids or params.stop):
            return self._plain_rules[params.ignore_eos]
        bad_words, stops = tuple(params.bad_words or ()), params.stops
        if self._tokenizer is None and (bad_words or params.ends_by_text):
            field = "stop" if stops else "bad_words" if bad_words else "repetition_detection"
            raise InvalidRequest(field, "needs text, but there is no tokenizer", "use stop_token_ids or logit_bias")
        eos_ids = () if params.ignore_eos else self._eos_ids
        banned = [ids for word in bad_words for ids in self._tokenizer.bad_word_ids(word)] if self._tokenizer else []
        grammar = self._grammar(params) if check else None
        return TokenRules(
            end_ids=tuple(dict.fromkeys((*eos_ids, *(params.stop_token_ids or ())))),
            bad_words=tuple(banned),
            eos_ids=eos_ids,
            grammar="" if grammar is None else grammar.text,
            grammar_digest="" if grammar is None else grammar.digest,
        )

    def _grammar(self, params: SamplingParams) -> CheckedGrammar | None:
        if params.structure is None:
            return None
        if self._checker is None or self._tokenizer is None:
            raise InvalidRequest("structured_outputs", "needs text, but there is no tokenizer", "leave it out")
        return self._checker.check(plan_of(params.structure, self._tokenizer.special_tokens))
