"""The tokenizer that an LLM gives to its users: methods with the names of transformers' tokenizers, and the model's
chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from quire.serving.requests import Message, read_conversations
from quire.serving.text.chat_template import ChatTemplates
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "padding": (None, False),
    "truncation": (None, False),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_assistant_tokens_mask": (None, False),
    "return_token_type_ids": (None, False),
    "tokenizer_kwargs": (None, {}),
}


class Encoding(dict[str, Any]):
    """Token ids and attention mask. Values can be read by key or by attribute."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class ChatTokenizer:
    """Encodes and decodes text and renders conversations, with the names and defaults of transformers' tokenizers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(tokenizer)

    # ------------------------------------------------------------------------------------------------ vocabulary
    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """The first of the tokens that end an answer, or None."""
        return next(iter(self._tokenizer.eos_ids), None)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._tokenizer.token_text(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._tokenizer.token_text(self.eos_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._tokenizer.token_text(token) for token in self.all_special_ids]

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.vocabulary()

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return a token as the vocabulary spells it, or a list of several. An id without a token gives None."""
        if isinstance(ids, int):
            return self._tokenizer.raw_token(ids)
        return [self._tokenizer.raw_token(int(token)) for token in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of one token, or a list of several. A token that is not in the vocabulary gives None."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    # ------------------------------------------------------------------------------------------------------ text
    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any) -> Encoding:
        """Return the token ids of one text or of several, as `input_ids`, with an attention mask of ones."""
        _check_options(options)
        ids: Any = self.encode(text, add_special_tokens) if isinstance(text, str) else None
        if ids is None:
            ids = self._tokenizer.encode_batch(list(text), add_special_tokens)
        return _encoding(ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        if not isinstance(text, str):
            raise InvalidRequest("text", f"must be text, got {type(text).__name__}", "call the tokenizer for a list")
        return self._tokenizer.encode(text, add_special_tokens)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str | None]:
        """Return the tokens of `text` as the vocabulary spells them."""
        return [self._tokenizer.raw_token(token) for token in self.encode(text, add_special_tokens)]

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, with special tokens unless `skip_special_tokens`. Raises InvalidRequest for
        negative ids."""
        try:
            ids = [index(token) for token in ([token_ids] if isinstance(token_ids, int) else token_ids)]
        except TypeError:
            ids = [-1]
        if min(ids, default=0) < 0:
            raise InvalidRequest("token_ids", f"must be token ids, got {token_ids!r:.80}", "pass numbers from 0 on")
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of every sequence, as `decode` does."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    # ------------------------------------------------------------------------------------------------------ chat
    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Render one conversation or a list of them. Returns token ids, or text if `tokenize` is false.

        `variables` are passed to the template, for example enable_thinking.
        """
        _check_options({name: variables.pop(name) for name in list(variables) if name in _NEUTRAL})
        if documents is not None:
            variables["documents"] = documents
        given: list[Any] = list(conversation)
        if not given:
            raise InvalidRequest("conversation", "is empty", "give at least one message")
        texts = self._templates.render(
            read_conversations(given),
            chat_template,
            variables,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        is_one = isinstance(given[0], Mapping)
        if not tokenize:
            return texts[0] if is_one else texts
        ids = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        found: Any = ids[0] if is_one else ids
        return _encoding(found) if return_dict else found


def _encoding(ids: Any) -> Encoding:
    is_one = not ids or isinstance(ids[0], int)
    mask = [1] * len(ids) if is_one else [[1] * len(each) for each in ids]
    return Encoding(input_ids=ids, attention_mask=mask)


def _check_options(options: Mapping[str, object]) -> None:
    """Raise InvalidRequest for an option of transformers' tokenizers that is not supported here."""
    for name, value in options.items():
        if not any(value is neutral or value == neutral for neutral in _NEUTRAL.get(name, ())):
            raise InvalidRequest(name, f"{value!r} is not supported: lists of token ids are returned", "leave it out")
