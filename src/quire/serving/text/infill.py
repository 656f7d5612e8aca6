"""Prompts for the text between a prefix and a suffix (fill in the middle), for models that were trained for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marks:
    """The fill-in-the-middle tokens of one model family, as its vocabulary spells them."""

    prefix: str
    suffix: str
    middle: str  # empty: the format has none
    ends: tuple[str, ...] = ()  # tokens that end the middle, in addition to the marks and eos
    file: str = ""  # the token before a file name
    is_suffix_first: bool = False


FAMILIES = (
    Marks(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|repo_name|>"), "<|file_sep|>"
    ),  # Qwen
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<repo_name>"), "<file_sep>"),  # StarCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    Marks("[PREFIX]", "[SUFFIX]", "", is_suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The fill-in-the-middle prompt format of one model."""

    tokenizer: Tokenizer
    marks: Marks

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end the middle: those with which a model would begin another file or another prompt."""
        marks = self.marks
        names = (marks.prefix, marks.suffix, marks.middle, marks.file, *marks.ends)
        found = [self.tokenizer.token_id(name) for name in names if name]
        return [token for token in found if token is not None]

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        """Return the token ids of a prompt for the text between `prefix` and `suffix`. `files` are names and texts of
        other files, put before it as context."""
        marks = self.marks
        before = [self._id(marks.prefix), *self._encode(prefix)]
        after = [self._id(marks.suffix), *self._encode(suffix)]
        ordered = [*after, *before] if marks.is_suffix_first else [*before, *after]
        middle = [self._id(marks.middle)] if marks.middle else []
        edges = self.tokenizer.encode("", add_special_tokens=True)
        begin = edges[:1] if edges and edges[0] == self.tokenizer.bos_id else []
        return (*begin, *self._files(files), *ordered, *middle)

    def _files(self, files: Sequence[tuple[str, str]]) -> list[int]:
        found: list[int] = []
        mark = self.tokenizer.token_id(self.marks.file) if self.marks.file else None
        for name, text in files:
            found += [mark] if mark is not None else []
            found += self._encode(f"{name}\n{text}\n")
        return [*found, mark] if files and mark is not None else found

    def _id(self, name: str) -> int:
        found = self.tokenizer.token_id(name)
        assert found is not None
        return found

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []


def infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format of the model's family, detected by the special tokens in its vocabulary, or None."""
    for marks in FAMILIES:
        names = [name for name in (marks.prefix, marks.suffix, marks.middle) if name]
        if all(tokenizer.token_id(name) is not None for name in names):
            return InfillFormat(tokenizer, marks)
    return None
