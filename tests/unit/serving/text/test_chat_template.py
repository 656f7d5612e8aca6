"""Chat templates: what they render, and what they are given."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.template_budget import TemplateLimits
from quire.types.errors import InvalidRequest, ModelLoadError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content or '' %}{%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {% generation %}{{- content + '<|im_end|>\n' }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- set call = {'name': tool_call.name, 'arguments': tool_call.arguments} %}
            {{- '<tool_call>\n' ~ call | tojson ~ '\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% macro args(call) -%}
{%- for key, value in call.arguments | dictsort %}{{ key }}={{ value }}{% if not loop.last %}, {% endif %}{% endfor %}
{%- endmacro %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if loop.index0 > 100 %}{% break %}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] %s [/INST]' % message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' {} '.format(message['content'] or '') ~ eos_token }}
        {%- for call in message.get('tool_calls') or [] %}
            {{- call.function.name }}({{ args(call.function) }})
        {%- endfor %}
    {%- elif message['role'] != 'tool' %}
        {{- raise_exception('Only user and assistant roles are supported, got ' + message['role'] + '!') }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The <b>weather</b> & "more" in Zürich',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 1.5}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Grüße <you> & 'me'"}],
    "with a system prompt": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": " x\n"}],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "easy"},
    ],
}
USER = CONVERSATIONS["one question"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_those_of_transformers(template: str, conversation: str) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    ours = ChatTemplate(TEMPLATES[template], bos_token="<s>", eos_token="</s>")
    messages = CONVERSATIONS[conversation]
    if conversation == "tools" and not ours.writes_calls:
        pytest.skip("calls are written for this template: see test_described_tools.py")
    for tools in (None, TOOLS) if ours.reads_tools else (None,):
        for ending in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
            try:
                (expected,), _ = reference.render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=TEMPLATES[template],
                    bos_token="<s>",
                    eos_token="</s>",
                    **ending,
                )
            except Exception:  # noqa: BLE001
                with pytest.raises(InvalidRequest):
                    ours.render(messages, tools=tools, **ending)
            else:
                assert ours.render(messages, tools=tools, **ending) == expected


@pytest.mark.parametrize("template", ["chatml", "llama", "qwen"])
@pytest.mark.parametrize("final", ["The answer", "The answer ", "  spaced  "])
def test_a_final_message_is_left_open_as_transformers_leaves_it(template: str, final: str) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [*USER, {"role": "assistant", "content": final}]
    (expected,), _ = reference.render_jinja_template(
        [messages], chat_template=TEMPLATES[template], continue_final_message=True, bos_token="<s>", eos_token="</s>"
    )
    ours = ChatTemplate(TEMPLATES[template], bos_token="<s>", eos_token="</s>")
    assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_the_templates_own_system_prompt_is_used_when_none_is_given() -> None:
    prompt = ChatTemplate(CHATML).render([{"role": "user", "content": "Hi"}])
    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_message_cannot_be_continued_and_a_new_one_begun() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message.*add_generation_prompt=False"):
        ChatTemplate(CHATML).render(USER, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("{{ messages[0].role }}").render(USER, add_generation_prompt=False, continue_final_message=True)


def test_variables_are_allowed_when_the_template_reads_them() -> None:
    template = ChatTemplate(QWEN)
    assert "enable_thinking" in template.variables
    assert template.variables.isdisjoint({"messages", "tools", "namespace", "message", "loop"})
    assert template.render(USER, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(InvalidRequest, match="chat_template_kwargs.chat_format.*it reads: .*enable_thinking"):
        template.render(USER, chat_format="x")


@pytest.mark.parametrize("name", ["bos_token", "raise_exception", "namespace", "range"])
def test_names_the_template_relies_on_cannot_be_replaced(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name}"):
        ChatTemplate(LLAMA + "{{ namespace, range }}", bos_token="<s>").render(USER, **{name: "x"})


def test_a_variable_must_be_plain_data() -> None:
    with pytest.raises(InvalidRequest, match="enable_thinking: must be JSON data, got object"):
        ChatTemplate(QWEN).render(USER, enable_thinking=object())


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo<|im_end|>" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])


def test_tool_arguments_sent_as_json_text_are_read() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert '"arguments": {"city": "Köln"}' in ChatTemplate(QWEN).render(messages)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages: must be a list with at least one message"),
        ("hi", "messages: must be a list"),
        ([1], r"messages\[0\]: must be an object, got int"),
        ([{"content": "x"}], r"messages\[0\].role: must be text"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "r" * 65, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "usr", "content": "x"}], r"messages\[0\].role: is 'usr', which the .* send one of system, dev"),
        ([*USER, {"role": "content", "content": "x"}], r"messages\[1\].role: is 'content'"),
        ([{"role": "user"}], r"messages\[0\].content: is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: must be text or a list of parts, got int"),
        ([{"role": "user", "content": "x", "mood": 1}], r"messages\[0\].mood: is not known"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"content\[0\]: is 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: is 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "name": 1}], r"messages\[0\].name: must be text"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]: must name a function"),
        ([{"role": "assistant", "refusal": 5}], r"messages\[0\].refusal: must be text"),
    ],
)
def test_messages_out_of_shape_are_refused_by_name(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(CHATML).render(messages)


def test_tools_must_be_plain_descriptions() -> None:
    with pytest.raises(InvalidRequest, match="tools: must be a list"):
        ChatTemplate(QWEN).render(USER, tools={"type": "function"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"tools\[0\].f: must be JSON data, got function"):
        ChatTemplate(QWEN).render(USER, tools=[{"f": test_tools_must_be_plain_descriptions}])


def test_the_callers_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_what_the_template_refuses_is_told_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="Only user and assistant roles are supported, got critic!"):
        ChatTemplate("{# 'critic' #}" + MISTRAL).render([{"role": "critic", "content": "x"}])


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_role_that_the_template_names_is_accepted(quote: str) -> None:
    template = f"{{# Roles: {quote}critic{quote} #}}{CHATML}"
    assert "critic" in ChatTemplate(template).render([{"role": "critic", "content": "x"}])


def test_empty_fields_a_client_sends_back_are_no_fields() -> None:
    message = {"role": "user", "content": "Hi", "refusal": None, "tool_calls": None, "name": None}
    assert ChatTemplate(CHATML).render([message]) == ChatTemplate(CHATML).render([{"role": "user", "content": "Hi"}])


def test_templates_may_ask_for_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%d %B %Y, %H:%M') }}").render(USER)[:2].isdigit()


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for x in y %}", "{{ 'a' | nonsense }}"])
def test_a_template_that_does_not_compile_is_refused_at_once(source: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template: line 1"):
        ChatTemplate(source)


def test_oversized_templates_and_conversations_are_refused() -> None:
    limits = TemplateLimits(source_characters=100, messages=2, input_characters=50, output_characters=40)
    with pytest.raises(ModelLoadError, match="has 101 characters, limit 100"):
        ChatTemplate("x" * 101, limits=limits)
    template = ChatTemplate("{{ messages[0].content * 3 }}", limits=limits)
    with pytest.raises(InvalidRequest, match="has 3 messages, limit 2"):
        template.render(USER * 3)
    with pytest.raises(InvalidRequest, match="more than 50 characters"):
        template.render([{"role": "user", "content": "x" * 60}])
    with pytest.raises(InvalidRequest, match="wrote more than 40 characters"):
        template.render([{"role": "user", "content": "x" * 20}])


def test_a_long_conversation_renders_within_the_default_limits() -> None:
    turn = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "answer " * 100}]
    for source in TEMPLATES.values():
        assert "answer" in ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(turn * 500)


def test_threads_may_share_a_template() -> None:
    template, results = ChatTemplate(CHATML), {}

    def work(number: int) -> None:
        results[number] = template.render([{"role": "user", "content": f"question {number}"}])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"question {number}<" in results[number] for number in range(8))


# ------------------------------------------------------------------------- what servers return is accepted back
def test_an_assistant_message_without_content_renders_as_an_empty_one() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None},
        {"role": "assistant", "content": None, "refusal": "I would rather not"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    assert template.render(messages) == "[user:hi][assistant:][assistant:I would rather not][assistant:no]"


BROKEN = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Bo'}}]}]


def test_tool_arguments_that_are_no_json_are_written_as_the_model_wrote_them() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}")
    assert template.render(BROKEN) == '{"city": "Bo'


def test_tool_arguments_that_are_no_json_render_where_a_template_prints_their_members() -> None:
    members = "{% for name, value in messages[0].tool_calls[0].function.arguments | dictsort %}{{ name }}={{ value }}"
    assert ChatTemplate(members + "{% endfor %}").render(BROKEN) == 'arguments={"city": "Bo'


def test_the_old_form_of_a_call_and_its_result_renders_as_the_new_one() -> None:
    messages = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    source = "{{ messages[0].tool_calls[0].function.arguments.a }}|{{ messages[1].role }}"
    assert ChatTemplate(source).render(messages) == "1|tool"


@pytest.mark.parametrize(
    ("source", "role"), [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")]
)
def test_a_developer_is_the_system_where_the_template_does_not_know_developers(source: str, role: str) -> None:
    assert ChatTemplate(source).render([{"role": "developer", "content": "x"}]) == role


def test_arguments_are_json_text_for_templates_that_join_them_to_other_text() -> None:
    joining = (
        "{% for m in messages %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ '<call>' + call.function.name + '<sep>' + call.function.arguments + '</call>' }}{% endfor %}{% endfor %}"
    )
    template, called = ChatTemplate(joining), {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for _ in range(2):
        assert template.render([called]) == '<call>weather<sep>{"city": "Köln", "n": 1.5}</call>'
    assert template.render(BROKEN) == '<call>f<sep>{"city": "Bo</call>'


def test_arguments_stay_objects_for_templates_that_fail_for_another_reason() -> None:
    failing = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ 'a' + messages[0].content }}"
    with pytest.raises(InvalidRequest, match="TypeError"):
        ChatTemplate(failing).render([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
