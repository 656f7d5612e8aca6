"""The formats of tool calls that Quire reads, and the choice of the one that a model uses."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from quire.serving.text.tool_calls import (
    deepseek_v3,
    derived,
    gemma4,
    granite,
    harmony,
    hermes,
    llama3_json,
    marked_json,
    mistral,
    pythonic,
)
from quire.serving.text.tool_calls.call_book import CallBook
from quire.serving.text.tool_calls.call_reader import AnswerReader, Parameters
from quire.serving.text.tool_calls.shape import CallShape
from quire.serving.text.tool_calls.tag_formats import ARGUMENT, DSML, FUNCTION, TAGGED, VALUE
from quire.serving.text.tool_calls.tagged import tag_reader

_LETTERS = string.ascii_letters + string.digits
HARMONY = "harmony"


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return an id of 9 characters, the only length that Mistral's templates accept."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls. `marks` are texts that may be special tokens of a vocabulary; detokenization must then
    show them."""

    name: str
    marks: tuple[str, ...]
    reader_class: type[AnswerReader]
    shape: Callable[[Mapping[str, int]], CallShape]  # called with the special tokens of the vocabulary
    make_id: Callable[[], str] = _long_id
    is_bare: bool = False  # calls may have no mark: only the tools' names distinguish them from other text

    @property
    def can_be_strict(self) -> bool:
        """Whether a grammar can enforce the schemas of calls inside text. This needs a mark that begins the calls."""
        return bool(self.shape({}).mark)

    def book(self, parameters: Parameters, limit: int | None, *, must_call: bool = False) -> CallBook:
        known = parameters.keys() if self.is_bare else None
        return CallBook(self.make_id, limit=limit, known=known, must_call=must_call)

    def reader(self, parameters: Parameters, limit: int | None, *, must_call: bool = False) -> AnswerReader:
        """Return a reader for one answer with at most `limit` calls of the tools in `parameters`.

        `must_call` means that a grammar ensures that the answer consists of calls.
        """
        return self.reader_class(self.book(parameters, limit, must_call=must_call), parameters)


def _fixed(shape: CallShape) -> Callable[[Mapping[str, int]], CallShape]:
    return lambda _: shape


_LFM2, _OLMO3, _PHI4 = pythonic.Lfm2Reader, pythonic.Olmo3Reader, marked_json.Phi4Reader
_FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", (hermes.START, hermes.END), hermes.HermesReader, _fixed(hermes.SHAPE)),
        ToolFormat(
            "llama3_json", (llama3_json.MARK,), llama3_json.Llama3Reader, _fixed(llama3_json.SHAPE), is_bare=True
        ),
        ToolFormat(
            "pythonic", (pythonic.START, pythonic.END), pythonic.PythonicReader, _fixed(pythonic.SHAPE), is_bare=True
        ),
        ToolFormat("mistral", (mistral.MARK, mistral.ARGUMENTS), mistral.MistralReader, mistral.shape, _short_id),
        ToolFormat("deepseek_v3", deepseek_v3.DEEPSEEK, deepseek_v3.DeepSeekReader, _fixed(deepseek_v3.SHAPE_V3)),
        ToolFormat("deepseek_v31", deepseek_v3.DEEPSEEK, deepseek_v3.DeepSeekReader, _fixed(deepseek_v3.SHAPE_V31)),
        ToolFormat("kimi_k2", deepseek_v3.KIMI, deepseek_v3.KimiReader, _fixed(deepseek_v3.SHAPE_KIMI)),
        ToolFormat("granite", (granite.MARK, hermes.START, hermes.END), granite.GraniteReader, _fixed(granite.SHAPE)),
        ToolFormat("gemma4", gemma4.MARKS, gemma4.Gemma4Reader, _fixed(gemma4.SHAPE)),
        ToolFormat(
            "functiongemma",
            (gemma4.FUNCTION_START, gemma4.FUNCTION_END, gemma4.ESCAPE),
            gemma4.FunctionGemmaReader,
            _fixed(gemma4.FUNCTION_GEMMA_SHAPE),
        ),
        ToolFormat(HARMONY, harmony.MARKS, harmony.HarmonyReader, _fixed(harmony.SHAPE)),
        ToolFormat("lfm2", (*_LFM2.marks, _LFM2.end), _LFM2, _fixed(pythonic.LFM2_SHAPE)),
        ToolFormat("olmo3", (*_OLMO3.marks, _OLMO3.end), _OLMO3, _fixed(pythonic.OLMO3_SHAPE)),
        ToolFormat("phi4_mini_json", (*_PHI4.marks, _PHI4.end), _PHI4, _fixed(marked_json.PHI4_SHAPE)),
        ToolFormat("xlam", (llama3_json.MARK,), llama3_json.Llama3Reader, _fixed(marked_json.XLAM_SHAPE), is_bare=True),
        *(
            ToolFormat(name, form.tokens, form.reader_class(), _fixed(form.shape))
            for name, form in marked_json.JSON_FORMS.items()
        ),
        *(ToolFormat(name, tags.tokens, tag_reader(tags), _fixed(tags.shape)) for name, tags in TAGGED.items()),
    )
}


def tool_format_named(name: str) -> ToolFormat:
    """Return the format of this name, which may be a derived one."""
    if not name.startswith(derived.PREFIX):
        return _FORMATS[name]
    form = derived.form_named(name)
    return ToolFormat(name, form.marks, form.reader_class(), _fixed(form.shape))


def tool_format(
    parser: str, template: str | None, *, reads_tools: bool, render: derived.Render | None = None
) -> ToolFormat | None:
    """Return the format of this name; for "auto", the one that the model's chat template uses, or None if it is
    unknown.

    A model whose template does not read tools gets their description as text, with the Hermes format. `render` renders
    a conversation with the template: the chosen format is the first one that reads the rendered calls. The format whose
    marks are in the template is tried first, then all others, then one derived from the rendered calls. Without
    `render`, the marks in the template decide.
    """
    if parser != "auto":
        return _FORMATS[parser]
    if template is None or not reads_tools:
        return _FORMATS["hermes"]
    name = known_in(template)
    written = None if render is None else derived.written_calls(render)
    if written is None or name == HARMONY:  # harmony answers begin in the middle of a message
        return None if name is None else _FORMATS[name]
    names = [*([name] if name else []), *_FORMATS]
    form = derived.derive_form(written)
    for one in (*names, *([form.name] if form is not None else [])):
        found = tool_format_named(one)
        reader = partial(found.reader, derived.PROBE_PARAMETERS, None)
        if derived.reads(reader, written, after_words=one == name and not found.is_bare):
            return found
    return None


def known_in(template: str) -> str | None:
    """Return the name of the format whose marks are in a template, or None."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    return next((name for name, marks in _IN_TEMPLATES if all(mark in template for mark in marks)), None)


# The first format all of whose marks are in a template is the template's.
_IN_TEMPLATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gemma4", (gemma4.START, gemma4.END)),
    ("functiongemma", (gemma4.FUNCTION_START,)),
    ("mistral", (mistral.MARK,)),
    ("deepseek_v4", (DSML, "tool_calls>")),
    ("deepseek_v32", (DSML,)),
    ("deepseek_v3", (deepseek_v3.DEEPSEEK.separator, deepseek_v3.FENCE)),
    ("deepseek_v31", (deepseek_v3.DEEPSEEK.separator,)),
    ("kimi_k2", (deepseek_v3.KIMI.separator,)),
    ("step3", (TAGGED["step3"].start,)),
    ("seed_oss", (TAGGED["seed_oss"].start,)),
    ("minimax_m2", (TAGGED["minimax_m2"].start,)),
    ("lfm2", _LFM2.marks),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ('"List of tools: ["',)),
    ("olmo3", _OLMO3.marks),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("phi4_mini_json", (marked_json.FUNCTOOLS,)),
    ("minimax_m1", ("<tool_calls>\\n", "<beginning_of_sentence>")),
    *((name, (form.start,)) for name, form in marked_json.JSON_FORMS.items() if name != "minimax_m1"),
    ("glm47", (hermes.START, f"</arg_key>{VALUE}")),
    ("glm45", (hermes.START, ARGUMENT)),
    ("qwen3_coder", (hermes.START, FUNCTION)),
    ("granite", (granite.MARK,)),
    ("hermes", (hermes.START,)),
    ("pythonic", (pythonic.START,)),
    ("llama3_json", (llama3_json.MARK,)),
    ("llama3_json", ("ipython", '"parameters"')),
    ("minicpm5", (TAGGED["minicpm5"].function[0], TAGGED["minicpm5"].parameter)),
)
