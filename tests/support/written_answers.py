"""Answers as models write them in every format: words, reasoning and calls, made at random, whole or spoiled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from quire.serving.text.message_reading import MessageReading
from quire.serving.text.reasoning import reasoning_format_named
from quire.serving.text.tool_calls.derived import DerivedForm
from quire.serving.text.tool_calls.formats import tool_format_named

Call = tuple[str, dict[str, Any]]
TOOLS: dict[str, dict[str, Any]] = {
    "look_up": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}
JSON_IN_TAGS = DerivedForm("<use>", "</use>", name_key="tool", arguments_key="input").name
NAME_THEN_JSON = DerivedForm(">>>", "<<<", "::").name
_WORDS = ("so", "a < b", "{x}", "[1, 2]", "<b>", "it's", '"quoted"', "ümläut 🦜", "\n", "  ", "```", "<|", "to=")
_TEXTS = ("", "plain", 'quo"te', "new\nline", "</tool_call>", "}]", "\\", "🦜", "<parameter", "), (", "[/x]")


def _object(call: Call, name: str = "name", arguments: str = "arguments") -> str:
    return json.dumps({name: call[0], arguments: call[1]}, ensure_ascii=False)


def _pythonic(calls: Sequence[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"[{', '.join(written)}]"


def _qwen3_coder(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        lines = [f"<tool_call>\n<function={name}>"]
        for key, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        written.append("\n".join([*lines, "</function>\n</tool_call>"]))
    return "\n".join(written)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _glm(calls: Sequence[Call], line: str) -> str:
    written = []
    for name, given in calls:
        pairs = (
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_text(one)}</arg_value>{line}" for key, one in given.items()
        )
        written.append(f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>")
    return line.join(written)


def _invokes(
    calls: Sequence[Call], prefix: str = "", before: str = "", after: str = "", *, is_typed: bool = False
) -> str:
    written = []
    for name, given in calls:
        lines = [f'{before}<{prefix}invoke name="{name}">']
        for key, one in given.items():
            kind = f' string="{str(isinstance(one, str)).lower()}"' if is_typed else ""
            lines.append(f'<{prefix}parameter name="{key}"{kind}>{_text(one)}</{prefix}parameter>')
        written.append("\n".join([*lines, f"</{prefix}invoke>{after}"]))
    return "\n".join(written)


def _dsml(calls: Sequence[Call], block: str) -> str:
    return f"<｜DSML｜{block}>\n{_invokes(calls, '｜DSML｜', is_typed=True)}\n</｜DSML｜{block}>"


def _seed_oss(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        lines = [f"<parameter={key}>{_text(one)}</parameter>" for key, one in given.items()]
        written.append(
            "\n".join(["<seed:tool_call>", f"<function={name}>", *lines, "</function>", "</seed:tool_call>"])
        )
    return "\n".join(written)


def _hy_v3(calls: Sequence[Call]) -> str:
    of, lines = ":opensource", ["<tool_calls:opensource>"]
    for name, given in calls:
        lines.append(f"<tool_call{of}>{name}<tool_sep{of}>")
        for key, one in given.items():
            lines += [f"<arg_key{of}>{key}</arg_key{of}>", f"<arg_value{of}>{_text(one)}</arg_value{of}>"]
        lines.append(f"</tool_call{of}>")
    return "\n".join([*lines, "</tool_calls:opensource>"])


def _minicpm5(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{_text(one)}</param>' for key, one in given.items())
        + "</function>"
        for name, given in calls
    )


def _kimi_k2(calls: Sequence[Call]) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{_text(given)}<|tool_call_end|>"
        for place, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def _cohere_command(calls: Sequence[Call]) -> str:
    objects = (
        json.dumps({"tool_call_id": str(place), "tool_name": name, "parameters": given}, ensure_ascii=False)
        for place, (name, given) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n    {(',' + chr(10) + '    ').join(objects)}\n]<|END_ACTION|>"


def _deepseek(calls: Sequence[Call], *, fenced: bool) -> str:
    written = []
    for name, given in calls:
        text = json.dumps(given, ensure_ascii=False)
        body = f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```" if fenced else f"{name}<｜tool▁sep｜>{text}"
        written.append(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>")
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _gemma4_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma4_value(one)}' for key, one in value.items())}}}"
    return f"[{','.join(map(_gemma4_value, value))}]" if isinstance(value, list) else json.dumps(value)


def _harmony(calls: Sequence[Call]) -> str:
    (name, given), *_ = calls
    text = json.dumps(given, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(_object(call, arguments="parameters") for call in calls),
    "pythonic": _pythonic,
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]",
    "qwen3_coder": _qwen3_coder,
    "deepseek_v3": lambda calls: _deepseek(calls, fenced=True),
    "deepseek_v31": lambda calls: _deepseek(calls, fenced=False),
    "kimi_k2": _kimi_k2,
    "glm45": lambda calls: _glm(calls, "\n"),
    "glm47": lambda calls: _glm(calls, ""),
    "minimax_m2": lambda calls: f"<minimax:tool_call>\n{_invokes(calls)}\n</minimax:tool_call>",
    "seed_oss": _seed_oss,
    "deepseek_v32": lambda calls: _dsml(calls, "function_calls"),
    "deepseek_v4": lambda calls: _dsml(calls, "tool_calls"),
    "step3": lambda calls: (
        "<｜tool_calls_begin｜>\n"
        + _invokes(calls, "steptml:", "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>")
        + "\n<｜tool_calls_end｜>"
    ),
    "hy_v3": _hy_v3,
    "minicpm5": _minicpm5,
    "hunyuan_a13b": lambda calls: f"<tool_calls>[{', '.join(map(_object, calls))}]</tool_calls>",
    "minimax_m1": lambda calls: "\n".join(["<tool_calls>", *map(_object, calls), "</tool_calls>"]),
    "cohere_command": _cohere_command,
    "phi4_mini_json": lambda calls: f"<|tool_call|>[{', '.join(map(_object, calls))}]<|/tool_call|>",
    "lfm2": lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
    "olmo3": lambda calls: (
        f"<function_calls>{chr(10).join(_pythonic([call])[1:-1] for call in calls)}</function_calls>"
    ),
    "internlm": lambda calls: "".join(
        f"<|action_start|><|plugin|>\n{_object(call, arguments='parameters')}<|action_end|>" for call in calls
    ),
    "longcat": lambda calls: "\n".join(f"<longcat_tool_call>\n{_object(call)}\n</longcat_tool_call>" for call in calls),
    "xlam": lambda calls: f"[{', '.join(map(_object, calls))}]",
    "granite_20b_fc": lambda calls: "\n".join(f"<function_call> {_object(call)}" for call in calls),
    "granite": lambda calls: f"<|tool_call|>[{', '.join(map(_object, calls))}]",
    "gemma4": lambda calls: "".join(
        f"<|tool_call>call:{name}{_gemma4_value(given)}<tool_call|>" for name, given in calls
    ),
    "functiongemma": lambda calls: "".join(
        f"<start_function_call>call:{name}{_gemma4_value(given)}<end_function_call>".replace('<|"|>', "<escape>")
        for name, given in calls
    ),
    "harmony": _harmony,
    JSON_IN_TAGS: lambda calls: "\n".join(f"<use>{_object(call, 'tool', 'input')}</use>" for call in calls),
    NAME_THEN_JSON: lambda calls: "\n".join(f">>>{name}::{json.dumps(given)}<<<" for name, given in calls),
}
BARE = {"llama3_json", "pythonic", "xlam"}  # calls stand at the start of an answer
REASONINGS = {
    "deepseek_r1": "<think>\n{}\n</think>\n\n",
    "qwen3": "<think>\n{}\n</think>\n\n",
    "mistral": "[THINK]{}[/THINK]",
    "granite": "Here is my thought process:\n{}\nHere is my response:\n",
    "seed_oss": "<seed:think>{}</seed:think>",
    "cohere_command": "<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>",
    "ernie45": "<think>\n{}\n</think>\n\n<response>\n",
    "hunyuan_a13b": "<think>\n{}\n</think>\n<answer>\n",
    "kimi_vl": "◁think▷{}◁/think▷",
    "apertus": "<|inner_prefix|>{}<|inner_suffix|>",
    "gemma4": "<|channel>thought\n{}\n<channel|>",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
}


def random_calls(rng: random.Random) -> list[Call]:
    """One to three calls, no two of them alike."""
    found: dict[str, Call] = {}
    for _ in range(rng.randint(1, 3)):
        given: dict[str, Any] = {}
        name = rng.choice(list(TOOLS))
        if name == "look_up":
            given = {
                "text": rng.choice(_TEXTS),
                "count": rng.randint(-9, 99),
                "deep": {"k": [rng.choice(_TEXTS), None]},
            }
            given = dict(rng.sample(list(given.items()), rng.randint(1, 3)))
        found[json.dumps([name, given])] = (name, given)
    return list(found.values())


def random_words(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(0, 6)))


def random_answer(rng: random.Random, form: str, reasoning: str | None) -> str:
    """An answer with calls, words and reasoning, some of them; then cut short or spoiled, now and then."""
    calls = WRITERS[form](random_calls(rng))
    kind = rng.randrange(4)
    if form == "harmony":
        answer = calls if kind else f"<|channel|>final<|message|>{random_words(rng)}<|return|>"
    elif kind == 0:
        answer = random_words(rng)
    elif kind == 1 or form in BARE:
        answer = calls + (random_words(rng) if kind == 3 else "")
    else:
        answer = random_words(rng) + calls + (random_words(rng) if kind == 3 else "")
    if reasoning is not None and rng.random() < 0.6:
        answer = REASONINGS[reasoning].format(random_words(rng)) + answer
    if rng.random() < 0.4:
        answer = answer[: rng.randint(0, len(answer))]
    if rng.random() < 0.3 and answer:
        place = rng.randrange(len(answer))
        answer = answer[:place] + rng.choice(_WORDS) + answer[place + rng.randint(0, 2) :]
    return answer


def random_cuts(rng: random.Random, length: int) -> list[int]:
    """Places at which a text is cut: few, many, or all."""
    count = rng.choice((1, 2, 5, length // 2, length))
    return sorted(rng.choices(range(length + 1), k=count))


def reading_of(form: str, reasoning: str | None, *, inside: bool = False) -> MessageReading:
    return MessageReading(
        tools=tool_format_named(form),
        parameters=TOOLS,
        reasoning=None if reasoning is None else reasoning_format_named(reasoning),
        begins_inside=inside,
    )
