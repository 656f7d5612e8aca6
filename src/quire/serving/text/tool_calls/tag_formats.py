"""The tags of the formats that write parameters between tags, by the name of the format."""

from __future__ import annotations

from dataclasses import replace

from quire.serving.text.tool_calls.hermes import END, START
from quire.serving.text.tool_calls.tagged import Tags

FUNCTION = "<function="
ARGUMENT, VALUE = "<arg_key>", "<arg_value>"
DSML = "｜DSML｜"  # precedes the names of DeepSeek's tags


def _glm(space: str) -> Tags:
    return Tags(
        start=START,
        function=("", ""),
        function_end=END,
        parameter=ARGUMENT,
        key_ends=("</arg_key>",),
        value_start=VALUE,
        parameter_end="</arg_value>",
        after_name=space,
        between=space,
        separator=space,
    )


def _functions(start: str, end: str, around_value: str) -> Tags:
    """`<function=NAME>` with parameters, inside of `start` and `end`."""
    return Tags(
        start=start,
        end=end,
        function=(FUNCTION, ">"),
        function_end="</function>",
        parameter="<parameter=",
        key_ends=(">",),
        parameter_end="</parameter>",
        on_lines=True,
        after_start="\n",
        after_name="\n",
        around_value=around_value,
        between="\n",
        separator="\n",
        before_end="\n",
    )


def _invokes(start: str, end: str, prefix: str = "", before: str = "", after: str = "") -> Tags:
    """`<invoke name="NAME">` with parameters, several inside of `start` and `end`."""
    return Tags(
        start=start,
        end=end,
        function=(f'{before}<{prefix}invoke name="', '">'),
        function_end=f"</{prefix}invoke>{after}",
        parameter=f'<{prefix}parameter name="',
        key_ends=('">',),
        parameter_end=f"</{prefix}parameter>",
        is_listed=True,
        on_lines=True,
        after_start="\n",
        after_name="\n",
        between="\n",
        separator="\n",
        before_end="\n",
    )


def _dsml(block: str) -> Tags:
    """Invocations whose parameters say whether their value is plain text."""
    tags = _invokes(f"<{DSML}{block}>", f"</{DSML}{block}>", DSML)
    return replace(tags, key_ends=('" string="true">', '" string="false">'), on_lines=False)


_HUNYUAN = ":opensource"  # ends the names of the tags of Hunyuan 3
STEP3_START = "<｜tool_calls_begin｜>"
TAGGED: dict[str, Tags] = {
    "qwen3_coder": _functions(START, END, "\n"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": _invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "step3": _invokes(
        STEP3_START,
        "<｜tool_calls_end｜>",
        "steptml:",
        before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        after="<｜tool_call_end｜>",
    ),
    "hy_v3": Tags(
        start=f"<tool_calls{_HUNYUAN}>",
        end=f"</tool_calls{_HUNYUAN}>",
        function=(f"<tool_call{_HUNYUAN}>", f"<tool_sep{_HUNYUAN}>"),
        function_end=f"</tool_call{_HUNYUAN}>",
        parameter=f"<arg_key{_HUNYUAN}>",
        key_ends=(f"</arg_key{_HUNYUAN}>",),
        value_start=f"<arg_value{_HUNYUAN}>",
        parameter_end=f"</arg_value{_HUNYUAN}>",
        is_listed=True,
        after_start="\n",
        after_name="\n",
        between="\n",
        separator="\n",
        before_end="\n",
    ),
    "minicpm5": Tags(
        function=('<function name="', '">'),
        function_end="</function>",
        parameter='<param name="',
        key_ends=('">',),
        parameter_end="</param>",
        separator="\n",
    ),
}
