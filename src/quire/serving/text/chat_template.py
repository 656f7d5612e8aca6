"""Renders conversations to prompt text with a model's chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from quire.serving.text.call_ids import name_call_ids, shorten_call_ids
from quire.serving.text.chat_messages import (
    CALL_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    Message,
    PlainData,
    arguments_as_text,
    check_messages,
    check_tools,
    describe_tools,
    developers_as_system,
    wrap_text_arguments,
    write_calls,
)
from quire.serving.text.template_budget import Budget, TemplateLimits, TemplateTooCostly
from quire.serving.text.template_sandbox import TemplateEnvironment
from quire.serving.text.tool_calls.deepseek_v3 import KIMI
from quire.serving.text.tool_calls.history import history_writer
from quire.types.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    from quire.serving.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.text")

_END_MARK = "\U000f0000CONTINUE\U000f0001 "  # the end of a message to continue; trimmed: no space
_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "takes_images")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """One chat template, compiled once. `render` is thread-safe.

    Templates run in a sandbox and within TemplateLimits. A template that does something forbidden or exceeds a limit
    raises InvalidRequest.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        self.limits = limits or TemplateLimits()
        if len(source) > self.limits.source_characters:
            reason = f"has {len(source)} characters, limit {self.limits.source_characters}"
            raise ModelLoadError("chat template", reason, fix="use a smaller one")
        self._source, self._environment = source, TemplateEnvironment(self.limits.syntax_nodes)
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                "chat template", f"line {error.lineno}: {error.message}", fix="correct the template"
            ) from None
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            reason = f"cannot be compiled: {type(error).__name__}: {error}"
            raise ModelLoadError("chat template", reason, fix="correct the template") from None
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    @property
    def reads_messages(self) -> bool:
        """Whether the template reads the conversation."""
        return "messages" in self._read

    @property
    def reads_tools(self) -> bool:
        """Whether the template describes tools to the model."""
        return "tools" in self._read

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes the tool calls of messages, and so their results."""
        return "tool_calls" in self._source

    def names_role(self, role: str) -> bool:
        """Whether the template has `role` in quotes, as in `message.role == "ipython"`, and not as the name of a
        member, as in `message["content"]`."""
        is_quoted = f"'{role}'" in self._source or f'"{role}"' in self._source
        return is_quoted and role not in MESSAGE_FIELDS | PART_FIELDS | CALL_FIELDS

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of variables that the template reads and a request may set."""
        return self._read - _RESERVED - frozenset(self._environment.globals)

    @cached_property
    def _read(self) -> frozenset[str]:
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self._source)))

    @cached_property
    def _joins_arguments(self) -> bool:
        """Whether the template takes the arguments of calls as text only, as those of DeepSeek V3 and R1 do."""
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        asked, called = {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        values = {"documents": None, **self._tokens, "tools": None, "add_generation_prompt": False}

        def can_render(conversation: list[Message]) -> bool:
            try:
                self._run({**values, "messages": conversation}, 0, is_probe=True)
            except InvalidRequest:
                return False
            return True

        probe: list[Message] = [asked, called]
        return not can_render(probe) and can_render(arguments_as_text(probe))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        takes_images: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation. `variables` are passed to the template, for example
        enable_thinking.

        Tools, calls and results that the template does not support are written into the messages as text. Developer
        messages become system messages if the template does not know that role. With `takes_images`, parts of messages
        may be image placeholders. Raises InvalidRequest.
        """
        if continue_final_message and add_generation_prompt:
            reason = "cannot be combined with add_generation_prompt, which begins a new message"
            raise InvalidRequest("continue_final_message", reason, "set add_generation_prompt=False")
        data = PlainData(self.limits, takes_images=takes_images)
        conversation = check_messages(messages, data, self.limits, self.names_role)
        offered = check_tools(tools, data)
        if "developer" not in self._source:
            conversation = developers_as_system(conversation)
        if offered and not self.reads_tools:
            conversation, offered = describe_tools(write_calls(conversation), offered), None
        elif not self.writes_calls:
            conversation = write_calls(conversation, history_writer(self._source) if self.reads_tools else None)
        elif KIMI.separator in self._source:
            conversation = name_call_ids(conversation)
        elif any(message.get("tool_calls") for message in conversation) and self._joins_arguments:
            conversation = arguments_as_text(conversation)
        values = {
            "documents": None,
            **self._tokens,
            **{name: data.copy(name, self._allowed(name, value)) for name, value in variables.items()},
            "messages": conversation,
            "tools": offered,
            "add_generation_prompt": add_generation_prompt,
        }
        final = _mark_end(conversation) if continue_final_message else None
        try:
            prompt = self._run(values, data.size)
        except InvalidRequest:
            changed = self._rewritten(conversation)
            if changed is None:
                raise
            prompt = self._run({**values, "messages": changed}, data.size)
        return prompt if final is None else _cut_at_mark(prompt, final)

    def _rewritten(self, conversation: list[Message]) -> list[Message] | None:
        """Return a conversation that the template refused in a form that it may accept; None: there is no such form."""
        wrapped = wrap_text_arguments(conversation)
        shortened = shorten_call_ids(wrapped or conversation) if "length != 9" in self._source else None
        return shortened or wrapped

    def _allowed(self, name: str, value: Any) -> Any:
        if name not in self.variables:
            known = ", ".join(sorted(self.variables)) or "none"
            raise InvalidRequest(
                f"chat_template_kwargs.{name}", "is not read by this model's chat template", f"it reads: {known}"
            )
        return value

    def _run(self, values: dict[str, Any], input_size: int, *, is_probe: bool = False) -> str:
        context = self._template.new_context(values)
        context.budget = Budget(self.limits, input_size)  # type: ignore[attr-defined]
        parts, size = [], 0
        try:
            for part in self._template.root_render_func(context):
                size += len(part)
                if size > self.limits.output_characters:
                    raise TemplateTooCostly(f"it wrote more than {self.limits.output_characters} characters")
                parts.append(part)
        except TemplateTooCostly as error:
            raise InvalidRequest("chat_template", f"was stopped: {error}", "use the model's own template") from None
        except SecurityError as error:
            raise InvalidRequest("chat_template", f"is not allowed: {error}", "use the model's own template") from None
        except TemplateError as error:
            raise InvalidRequest("messages", f"refused by the chat template: {error}") from None
        except Exception as error:  # noqa: BLE001 (a template may raise any exception)
            if not is_probe:
                logger.warning("the chat template failed: %r", error)
            reason = f"the chat template cannot render them ({type(error).__name__})"
            raise InvalidRequest("messages", reason, "check their fields and the template's variables") from None
        return "".join(parts)


class ChatTemplates:
    """The chat templates for one model: its own, and those that calls pass. Each is compiled once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._default = tokenizer.chat_template
        self._bos_token = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        self._eos_token = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None
        self._compiled: dict[str, ChatTemplate] = {}

    def render(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        source: str | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[str]:
        """Return the prompt text of every conversation, rendered by the template `source` or the model's own. Raises
        InvalidRequest if there is none."""
        for name, value, kind in (("chat_template", source, str), ("chat_template_kwargs", variables, Mapping)):
            if value is not None and not isinstance(value, kind):
                wanted = "text" if kind is str else "an object of the template's variables"
                raise InvalidRequest(name, f"must be {wanted}, got {type(value).__name__}")
        for name in variables or {}:
            if name in _OPTIONS:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}",
                    "is not a template variable",
                    "pass it as an argument of its own, outside chat_template_kwargs",
                )
        template = self._find(source or self._default)
        if source and not template.reads_messages:
            reason = f"{source!r:.80} never reads the variable messages"
            raise InvalidRequest("chat_template", reason, "pass the text of a Jinja template, not the path of its file")
        return [template.render(each, **options, **(variables or {})) for each in conversations]

    def _find(self, source: str | None) -> ChatTemplate:
        if source is None:
            fix = "pass chat_template, or continue a text: generate(), `quire complete`"
            raise InvalidRequest("messages", "the model has no chat template", fix)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, bos_token=self._bos_token, eos_token=self._eos_token)
        return self._compiled[source]


def _mark_end(conversation: list[Message]) -> str:
    """Append the mark to the final message. Returns the message's text without it."""
    final = conversation[-1]["content"]
    if not isinstance(final, str):
        raise InvalidRequest("continue_final_message", "the final message has no content to continue", "give it some")
    conversation[-1]["content"] = final + _END_MARK
    return final


def _cut_at_mark(prompt: str, final: str) -> str:
    """Return the prompt up to the mark, without trailing space if the template trimmed the message."""
    place = prompt.rfind(_END_MARK.rstrip())
    if place < 0 or final.strip() not in prompt:
        reason = "the chat template does not write the final message unchanged"
        raise InvalidRequest("continue_final_message", reason, "turn it off")
    kept_space = prompt.startswith(_END_MARK, place)
    return prompt[:place] if kept_space else prompt[:place].rstrip()
