"""The tokenizer that users get from an LLM: the calls they know from transformers, and the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from quire.serving.requests import Message, read_conversations
from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest

_TEMPLATE_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
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
    """Token ids and attention mask, read by key or by attribute."""

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
        self._templates: dict[str, ChatTemplate] = {}

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
        """The first of the tokens that end a text."""
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

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        if isinstance(ids, int):
            return self._tokenizer.raw_token(ids)
        return [self._tokenizer.raw_token(int(token)) for token in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
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
        return self._tokenizer.encode(text, add_special_tokens)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str | None]:
        """Return the tokens of `text` as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Special tokens are part of it unless they are skipped."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return `decode` of every sequence."""
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

        `variables` are those that the template reads, such as enable_thinking.
        """
        _check_options({name: variables.pop(name) for name in list(variables) if name in _NEUTRAL})
        if documents is not None:
            variables["documents"] = documents
        texts = self.render(
            read_conversations(conversation),
            chat_template,
            variables,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        is_one = isinstance(conversation[0], Mapping)
        if not tokenize:
            return texts[0] if is_one else texts
        ids = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        found: Any = ids[0] if is_one else ids
        return _encoding(found) if return_dict else found

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[str]:
        """Return the prompt of every conversation. Raises InvalidRequest where there is no template."""
        for name in variables or {}:
            if name in _TEMPLATE_OPTIONS:
                raise InvalidRequest(f"chat_template_kwargs.{name}", "is no variable of templates", "pass it by itself")
        template = self._template(chat_template)
        return [template.render(each, **options, **(variables or {})) for each in conversations]

    def _template(self, source: str | None) -> ChatTemplate:
        source = source or self.chat_template
        if source is None:
            raise InvalidRequest("messages", "the model has no chat template", "pass chat_template, or use generate()")
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, bos_token=self.bos_token, eos_token=self.eos_token)
        return self._templates[source]


def _encoding(ids: Any) -> Encoding:
    is_one = not ids or isinstance(ids[0], int)
    mask = [1] * len(ids) if is_one else [[1] * len(each) for each in ids]
    return Encoding(input_ids=ids, attention_mask=mask)


def _check_options(options: Mapping[str, object]) -> None:
    """Raise InvalidRequest for an option of transformers' tokenizers that this one does not have."""
    for name, value in options.items():
        if not any(value is neutral or value == neutral for neutral in _NEUTRAL.get(name, ())):
            raise InvalidRequest(name, f"{value!r} is not supported: lists of token ids are returned", "leave it out")
