"""How models write the calls of their tools: the formats this server reads, and which of them a model uses."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from quire.serving.text.parts import PartReader
from quire.serving.text.tool_calls import hermes, llama3_json, mistral
from quire.serving.text.tool_calls.call_object import CallBook

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. `marks` are texts that may be special tokens of a vocabulary, and must then be shown."""

    name: str
    marks: tuple[str, ...]
    make_reader: Callable[[CallBook], PartReader]
    make_id: Callable[[], str]
    is_bare: bool = False  # calls may stand without a mark, so only the tools' names tell them from other JSON

    def reader(self, names: Collection[str], limit: int | None) -> PartReader:
        """For one answer, which may call these tools, and at most so often."""
        return self.make_reader(CallBook(self.make_id, limit=limit, known=names if self.is_bare else None))


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take no others."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


_FORMATS = {
    "hermes": ToolFormat("hermes", (hermes.START, hermes.END), hermes.HermesReader, _long_id),
    "llama3_json": ToolFormat("llama3_json", (llama3_json.MARK,), llama3_json.Llama3Reader, _long_id, is_bare=True),
    "mistral": ToolFormat("mistral", (mistral.MARK, mistral.ARGUMENTS), mistral.MistralReader, _short_id),
}


def tool_format(parser: str, template: str | None, *, reads_tools: bool) -> ToolFormat | None:
    """The format of that name; for "auto", what the model's chat template writes, None if that is not known.

    A model whose template takes no tools is told of them in words, and to write calls as Hermes does.
    """
    if parser != "auto":
        return _FORMATS[parser]
    if template is None or not reads_tools:
        return _FORMATS["hermes"]
    if mistral.MARK in template:
        return _FORMATS["mistral"]
    if hermes.START in template and "<function=" not in template:
        return _FORMATS["hermes"]
    if llama3_json.MARK in template or ("ipython" in template and '"parameters"' in template):
        return _FORMATS["llama3_json"]
    return None
