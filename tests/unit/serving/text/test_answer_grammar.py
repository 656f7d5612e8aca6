"""Whole grammars of answers: what they let a model say, in every format and combination."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.text.answer_grammar import AnswerPlan, CallPlan, CallRole, build_grammar, plan_of
from quire.serving.text.structure import Kind, Structure
from quire.serving.text.token_table import vocabulary_of
from quire.serving.text.tool_calls.formats import tool_format_named
from quire.serving.text.tool_calls.shape import MAX_CALLS
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, VOCAB, ids
from written_answers import JSON_IN_TAGS, NAME_THEN_JSON

TOKENS = GrammarTokens(vocabulary_of(TOKENIZER), VOCAB)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [{"name": "weather", "parameters": WEATHER}, {"name": "time"}]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
YES = Structure("choice", '["yes", "no"]')
NESTED = Structure("grammar", 'start: "(" start ")" | "x"')


def calls(form: str, role: CallRole = "required", most: int = MAX_CALLS) -> CallPlan:
    return CallPlan(form, json.dumps(TOOLS), role, most)


def matched(plan: AnswerPlan, text: str) -> str:
    """How much of a text the plan's grammar takes; "..." at the end: more must follow."""
    state = TOKENS.begin(build_grammar(plan))
    assert not state.is_error(), state.get_error()
    taken = 0
    for token in ids(text):
        if state.is_stopped() or not state.try_consume_tokens([token]):
            break
        taken += 1
    said = TOKENIZER.decode(ids(text)[:taken])
    return said if state.is_accepting() or state.is_stopped() else f"{said}..."


CALLS = [
    ("hermes", HERMES),
    ("hermes", f"{TIME}\n{HERMES}"),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "a"}}'),
    ("pythonic", '[weather(city="a", days=2), time(), weather(city="b")]'),
    ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "a"}}]'),
    ("qwen3_coder", ("<tool_call>\n<function=weather>\n<parameter=city>\nan <b> \n</parameter>\n<parameter=days>\n2\n"
     "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>")),
    ("deepseek_v3", ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "a"}'
     "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
    ("deepseek_v31", ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "a"}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
    ("kimi_k2", ('<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:12<|tool_call_argument_begin|>'
     '{"city": "a"}<|tool_call_end|><|tool_calls_section_end|>')),
    ("glm45", ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>an\n<b></arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>")),
    ("glm47", ("<tool_call>weather<arg_key>city</arg_key><arg_value>a</arg_value></tool_call>"
     "<tool_call>time</tool_call>")),
    ("minimax_m2", ('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">a</parameter>\n</invoke>\n'
     '<invoke name="time">\n</invoke>\n</minimax:tool_call>')),
    ("seed_oss", ("<seed:tool_call>\n<function=weather>\n<parameter=city>a</parameter>\n<parameter=days>2</parameter>\n"
     "</function>\n</seed:tool_call>")),
    ("deepseek_v32", ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
     'string="true">a</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
     "</｜DSML｜invoke>\n</｜DSML｜function_calls>")),
    ("deepseek_v4", ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')),
    ("step3", ('<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
     '<steptml:parameter name="city">a</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
     "<｜tool_calls_end｜>")),
    ("hy_v3", ("<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city"
     "</arg_key:opensource>\n<arg_value:opensource>a</arg_value:opensource>\n</tool_call:opensource>\n"
     "</tool_calls:opensource>")),
    ("minicpm5", ('<function name="weather"><param name="city">a</param></function>\n<function name="time">'
     "</function>")),
    ("hunyuan_a13b", '<tool_calls>[{"name": "time", "arguments": {}}]</tool_calls>'),
    ("minimax_m1", ('<tool_calls>\n{"name": "time", "arguments": {}}\n{"name": "weather", "arguments": {"city": "a"}}\n'
     "</tool_calls>")),
    ("cohere_command", ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "time", "parameters": {}},\n    '
     '{"tool_call_id": "1", "tool_name": "weather", "parameters": {"city": "a"}}\n]<|END_ACTION|>')),
    ("phi4_mini_json", 'functools[{"name": "time", "arguments": {}}]'),
    ("lfm2", '<|tool_call_start|>[weather(city="a", days=2), time()]<|tool_call_end|>'),
    ("olmo3", '<function_calls>weather(city="a")\ntime()</function_calls>'),
    ("internlm", '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "a"}}<|action_end|>'),
    ("longcat", '<longcat_tool_call>\n{"name": "time", "arguments": {}}\n</longcat_tool_call>'),
    ("xlam", '[{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "a"}}]'),
    ("granite_20b_fc", "\n".join(['<function_call> {"name": "time", "arguments": {}}'] * 2)),
    ("granite", '<|tool_call|>[{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "a"}}]'),
    ("gemma4", ('<|tool_call>call:weather{city:<|"|>an "x" \n<b><|"|>,days:2}<tool_call|>'
     "<|tool_call>call:time{}<tool_call|>")),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>a<escape>,days:2}<end_function_call>"),
    ("harmony", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "a"}'),
    (JSON_IN_TAGS, '<use>{"tool": "weather", "input": {"city": "a"}}</use>'),
    (NAME_THEN_JSON, '>>>weather::{"city": "a"}<<<>>>time::{}<<<'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), CALLS)
@pytest.mark.parametrize("role", ["required", "instead"])
def test_calls_in_the_models_own_format_are_taken(form: str, text: str, role: CallRole) -> None:
    structure = NESTED if role == "instead" else None
    assert matched(AnswerPlan(structure, calls(form, role)), text) == text
    assert matched(AnswerPlan(structure, calls(form, role)), "words").startswith("...")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("hello", "..."),
        ('<tool_call>\n{"name": "other"', '<tool_call>\n{"name": "...'),
        ('<tool_call>\n{"name": "time", "arguments": {"x"', '<tool_call>\n{"name": "time", "arguments": {...'),
        (f"{TIME}\n{HERMES}", TIME),
    ],
)
def test_nothing_else_is(text: str, taken: str) -> None:
    assert matched(AnswerPlan(calls=calls("hermes", most=1)), text) == taken


def test_required_calls_are_bounded() -> None:
    most = "\n".join([TIME] * MAX_CALLS)
    assert matched(AnswerPlan(calls=calls("hermes")), most) == most
    assert matched(AnswerPlan(calls=calls("hermes")), f"{most}\n{TIME}") == most


def test_marks_that_are_special_tokens_stand_as_tokens() -> None:
    special = (("[TOOL_CALLS]", EOS_ID), ("[ARGS]", EOS_ID))
    state = TOKENS.begin(build_grammar(AnswerPlan(calls=calls("mistral"), special=special)))
    said = [EOS_ID, *ids("time"), EOS_ID, *ids("{}")]
    assert state.try_consume_tokens(said) == len(said)
    assert state.is_accepting()


@pytest.mark.parametrize(("form", "text"), [one for one in CALLS if tool_format_named(one[0]).can_be_strict])
def test_calls_among_words_follow_their_schemas(form: str, text: str) -> None:
    if form == "harmony":
        said = ["<|channel|>final<|message|>only words < here", text]
    else:
        said = ["only words < here", f"words {text} more"]
    for answer in said:
        assert matched(AnswerPlan(calls=calls(form, "among")), answer) == answer


def test_calls_among_words_need_a_mark() -> None:
    assert matched(AnswerPlan(calls=calls("hermes", "among")), "words <tool_call>no") == "words <tool_call>..."
    with pytest.raises(InvalidRequest, match="tools"):
        build_grammar(AnswerPlan(calls=calls("llama3_json", "among")))


@pytest.mark.parametrize("structure", [YES, NESTED])
@pytest.mark.parametrize("reasoning", ["", "qwen3", "granite"])
def test_an_answer_may_match_a_structure_or_call(structure: Structure, reasoning: str) -> None:
    plan = AnswerPlan(structure, calls("hermes", "instead"), reasoning)
    answer = "yes" if structure is YES else "((x))"
    for text in (answer, HERMES):
        assert matched(plan, text) == text
    assert matched(plan, "maybe") == "..."


THINKING = {
    "qwen3": ("<think>", "\na < b\n</think>\n\n"),
    "deepseek_r1": ("<think>", "x</think>"),
    "mistral": ("[THINK]", "x[/THINK]"),
    "granite": ("Here is my thought process:", " x Here is my response: "),
    "seed_oss": ("<seed:think>", "x</seed:think>"),
    "cohere_command": ("<|START_THINKING|>", "x<|END_THINKING|>"),
    "kimi_vl": ("◁think▷", "x◁/think▷"),
    "gemma4": ("<|channel>thought\n", "a < b\n<channel|>"),
    "harmony": ("<|channel|>analysis<|message|>", "x<|end|><|start|>assistant"),
}


@pytest.mark.parametrize("reasoning", THINKING)
def test_reasoning_goes_before_a_structure(reasoning: str) -> None:
    (start, rest), final = THINKING[reasoning], "<|channel|>final<|message|>" if reasoning == "harmony" else ""
    optional = AnswerPlan(YES, None, reasoning)
    for text in (f"{final}yes", f"{start}{rest}{final}no"):
        assert matched(optional, text) == text
    assert matched(optional, "hm") == "..."
    opened = AnswerPlan(YES, None, reasoning, begins_inside=True)
    assert matched(opened, f"{rest}{final}yes") == f"{rest}{final}yes"
    assert matched(opened, "yes") == "yes..."


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("grammar", 'start: "(" start ")" | "x"', "((x))"),  # a rule that refers to `start`
        ("grammar", 'start: reasoning tool_call WORDS\nreasoning: "a"\ntool_call: "b"\nWORDS: "c"', "abc"),
        ("grammar", 'start: structured_outputs\nstructured_outputs: "s" start?', "sss"),
        ("grammar", 'start: whole_answer\nwhole_answer: "w"', "w"),
        ("grammar", 'start: "a" REASONING_SPACE\nREASONING_SPACE: "b"\n%ignore " "', "a b"),
        ("grammar", '// start here\nstart: "start" NL "start:"\nNL: "\\n"', "start\nstart:"),
        ("grammar", 'root ::= "r" root | "e"', "rre"),
        ("json", '{"const": "start"}', '"start"'),
        ("regex", "start: [a-c]+", "start: abc"),
    ],
)
def test_no_name_of_a_user_clashes_with_one_of_ours(kind: Kind, text: str, answer: str) -> None:
    structure = Structure(kind, text)
    assert matched(AnswerPlan(structure), answer) == answer
    whole = AnswerPlan(structure, calls("hermes", "instead"), "qwen3")
    for said in (answer, f"<think>x</think>{answer}", HERMES, f"<think>x</think>\n{HERMES}"):
        assert matched(whole, said) == said
    assert matched(whole, "<think>x</think>()") in ("<think>x</think>...", "<think>x</think>(...")


MARKS = tuple((mark, ids(mark)[0]) for mark in ("[THINK]", "[/THINK]"))


def bounded(structure: Structure | None, *, inside: bool, budget: int = 5, among: bool = False) -> AnswerPlan:
    calls_among = calls("hermes", "among") if among else None
    return AnswerPlan(structure, calls_among, "mistral", inside, special=MARKS, reasoning_budget=budget)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("thought", "taken"), [("", ""), ("abc", "abc"), ("abcde", "abcde"), ("abcdef", "abcde"), ("a[b/c]d", "a[b/c")]
)
def test_reasoning_ends_within_its_budget(inside: bool, thought: str, taken: str) -> None:
    start = "" if inside else "[THINK]"
    whole, closed = f"{start}{thought}[/THINK]any words", f"{start}{taken}[/THINK]any words"
    plan = bounded(None, inside=inside)
    assert matched(plan, closed) == closed
    assert matched(plan, whole) == (closed if thought == taken else f"{start}{taken}...")
    with_structure = bounded(YES, inside=inside)
    assert matched(with_structure, f"{start}{taken}[/THINK]\nyes") == f"{start}{taken}[/THINK]\nyes"
    assert matched(with_structure, f"{start}{taken}[/THINK]maybe").endswith("[/THINK]...")


@pytest.mark.parametrize("inside", [True, False])
def test_a_budget_of_nothing_leaves_no_reasoning(inside: bool) -> None:
    start = "" if inside else "[THINK]"
    assert matched(bounded(None, inside=inside, budget=0), f"{start}[/THINK]hi") == f"{start}[/THINK]hi"
    assert matched(bounded(None, inside=inside, budget=0), f"{start}x[/THINK]hi") == f"{start}..."


@pytest.mark.parametrize("among", [False, True])
def test_an_answer_without_reasoning_cannot_begin_any_past_the_budget(among: bool) -> None:
    plan = bounded(None, inside=False, among=among)
    for text in ("words", f"words {TIME}" if among else "(words)", "[THINK]abc[/THINK]words"):
        assert matched(plan, text) == text
    assert matched(plan, "[THINK]abcdefgh") == "[THINK]abcde..."
    assert matched(bounded(None, inside=False), "words [THINK]") == "words "


@pytest.mark.parametrize("budget", range(4))
def test_a_budget_is_kept_when_tokens_are_taken_back(budget: int) -> None:
    grammar = build_grammar(bounded(None, inside=False, budget=budget))
    matcher = GrammarMatcher(TOKENS, TOKENS.begin(grammar), (EOS_ID,))
    for token in ids(f"[THINK]{'x' * budget}[/THINK]yes"):
        matcher.mask()
        for _ in range(2):
            assert matcher.advance(token)
            matcher.rollback(1)
        fresh = GrammarMatcher(TOKENS, TOKENS.begin(grammar), (EOS_ID,))
        assert all(fresh.advance(one) for one in matcher.consumed)
        assert (matcher.mask() == fresh.mask()).all()
        assert matcher.advance(token)


@pytest.mark.parametrize("inside", [True, False])
def test_gemmas_channel_has_its_name_and_its_thoughts_a_budget(inside: bool) -> None:
    special = tuple(
        (mark, ids(token)[0]) for mark, token in zip(("<|channel>", "<channel|>"), dict(MARKS), strict=True)
    )
    plan = AnswerPlan(None, calls("gemma4", "among"), "gemma4", inside, special=special, reasoning_budget=3)
    start = "" if inside else "[THINK]thought\n"
    assert matched(plan, f"{start}abc[/THINK]words") == f"{start}abc[/THINK]words"
    assert matched(plan, f"{start}abcd[/THINK]words") == f"{start}abc..."
    assert matched(plan, f"{start}[/THINK]<|tool_call>call:time{{x") == f"{start}[/THINK]<|tool_call>call:time{{..."
    if not inside:
        assert matched(plan, "[THINK]other") == "[THINK]..."
        assert matched(plan, "words") == "words"


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    plans = [
        plan_of(StructuredOutputsParams(regex="a+")),
        AnswerPlan(NESTED, calls("hermes", "instead"), "qwen3", begins_inside=True, special=(("<think>", 5),)),
        bounded(None, inside=True),
    ]
    for plan in plans:
        assert AnswerPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_parameter_that_python_cannot_name_is_refused_where_calls_are_python() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a-b": {}}}}
    with pytest.raises(InvalidRequest, match="a-b"):
        build_grammar(AnswerPlan(calls=CallPlan("pythonic", json.dumps([function]), "required", 1)))
