"""A server whose model says what a script tells it to: enough for a client to call a tool and to talk about it."""

from __future__ import annotations

from http_server import MODEL, TestServer
from quire.config.engine import SchedulerConfig
from quire.config.server import ModelSource

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}{# <think></think> #}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {  # by what stands last in the conversation
    "tool:": "It is sunny in Köln.",
    "user:What is the weather?": CALL,
    "user:Think.": "<think>\nWell.\n</think>\n\nI thought.",
    "user:Describe Köln.": '{"city": "Köln"}',
    "user:Count.": "one two three",
}


def script(prompt: str, index: int) -> str:
    """The answer to the last message, or how many messages of users there are."""
    lines = [line for line in prompt.splitlines() if line.startswith(("user:", "tool:"))]
    found = (answer for asked, answer in ANSWERS.items() if lines and lines[-1].startswith(asked))
    return next(found, f"You wrote {sum(line.startswith('user:') for line in lines)} messages.")


def scripted_server() -> TestServer:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4_096)
    return TestServer(script, source=source, scheduler=scheduler)
