"""Prompts that ask for the text between a prefix and a suffix, for models that were trained to fill in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marks:
    """The special tokens of one family of models, as their vocabulary spells them."""

    prefix: str
    suffix: str
    middle: str  # empty: the model needs none
    ends: tuple[str, ...] = ()  # tokens after which the middle is over, besides the marks and the end of text
    file: str = ""  # goes before the name of a file
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
    """How one model is asked to fill in the middle."""

    tokenizer: Tokenizer
    marks: Marks

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end the middle: a model goes on with another file, or begins anew."""
        marks = self.marks
        names = (marks.prefix, marks.suffix, marks.middle, marks.file, *marks.ends)
        found = [self.tokenizer.token_id(name) for name in names if name]
        return [token for token in found if token is not None]

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        """The token ids that ask for what is between `prefix` and `suffix`. `files` are names and texts of other files
        that the model may learn from."""
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
    """The format of the model's family, found by the special tokens of its vocabulary; None: it has none."""
    for marks in FAMILIES:
        names = [name for name in (marks.prefix, marks.suffix, marks.middle) if name]
        if all(tokenizer.token_id(name) is not None for name in names):
            return InfillFormat(tokenizer, marks)
    return None
