"""From prompts to requests the engine takes: tokenized, with words resolved to token ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from quire.serving.process.grammar_check import GrammarChecker
from quire.serving.prompts import Prompt
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams, TokenRules


class RequestMaker:
    """Numbers and tokenizes requests. Without a tokenizer only token ids are taken and nothing may need text.

    Structured outputs go through the checker; without one they are refused, unless they were checked before.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, model_eos_ids: tuple[int, ...], checker: GrammarChecker | None = None
    ) -> None:
        self._tokenizer, self._checker = tokenizer, checker
        own = () if tokenizer is None else tokenizer.eos_ids
        self._eos_ids = tuple(dict.fromkeys((*own, *model_eos_ids)))
        self._numbers = itertools.count()

    def make(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        *,
        add_special_tokens: bool = True,
        priorities: Sequence[int] | None = None,
    ) -> list[Submit]:
        """One request per prompt, in order. Raises InvalidRequest naming the prompt at fault."""
        if priorities is not None and len(priorities) != len(prompts):
            raise InvalidRequest("priority", f"has {len(priorities)} entries for {len(prompts)} prompts")
        token_ids = self.tokenize(prompts, add_special_tokens)
        rules = {id(params): self.rules(params) for params in sampling}
        return [
            Submit(str(next(self._numbers)), pack_tokens(ids), params, rules[id(params)], priority)
            for ids, params, priority in zip(token_ids, sampling, priorities or [0] * len(prompts), strict=True)
        ]

    def tokenize(self, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[tuple[int, ...]]:
        """The token ids of every prompt; ids that were given stay as they are."""
        texts = [prompt.text for prompt in prompts if prompt.token_ids is None and prompt.text is not None]
        if texts and self._tokenizer is None:
            raise InvalidRequest("prompts", "are text, but there is no tokenizer", "pass token ids")
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens) if self._tokenizer and texts else ())
        return [tuple(next(encoded)) if prompt.token_ids is None else prompt.token_ids for prompt in prompts]

    def rules(self, params: SamplingParams, grammar: str | None = None) -> TokenRules:
        """What a request's words mean in this vocabulary.

        `grammar` is that of its structured outputs, if the caller sees to it; else they are checked now, which may
        take a second.
        """
        bad_words, stops = tuple(params.bad_words or ()), params.stops
        if self._tokenizer is None and (bad_words or params.ends_by_text):
            field = "stop" if stops else "bad_words" if bad_words else "repetition_detection"
            raise InvalidRequest(field, "needs text, but there is no tokenizer", "use stop_token_ids or logit_bias")
        eos_ids = () if params.ignore_eos else self._eos_ids
        banned = [ids for word in bad_words for ids in self._tokenizer.bad_word_ids(word)] if self._tokenizer else []
        return TokenRules(
            end_ids=tuple(dict.fromkeys((*eos_ids, *(params.stop_token_ids or ())))),
            bad_words=tuple(banned),
            eos_ids=eos_ids,
            grammar=self._grammar(params) if grammar is None else grammar,
        )

    def _grammar(self, params: SamplingParams) -> str:
        if params.structure is None:
            return ""
        if self._checker is None:
            raise InvalidRequest("structured_outputs", "needs text, but there is no tokenizer", "leave it out")
        return self._checker.check(params.structure)
