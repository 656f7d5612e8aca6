"""Writes structural tags as grammar expressions: free text until a trigger, tags with their contents, and the other
formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from quire.serving.text.lark import LarkGrammar, json_rule, lark_of, one_of, regex_rule
from quire.types.errors import InvalidRequest
from quire.types.structural_tag import ends_of

FIELD = "structured_outputs.structural_tag"
_NOTHING = '""'
_REPEATED = {"optional": "?", "plus": "+", "star": "*"}


def tag_expression(text: str, lark: LarkGrammar) -> str:
    """Return the expression of a structural tag, given as the JSON text that `read_structural_tag` returned."""
    return _Writer(lark).write(json.loads(text)["format"])


def fixed_texts(text: str) -> str:
    """Return all texts of a structural tag that an answer may have to contain literally, one per line."""
    return "\n".join(_fixed(json.loads(text)["format"]))


def _fixed(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            if name in ("begin", "end", "value", "separator"):
                yield from ([member] if isinstance(member, str) else member)
            elif name in ("content", "elements", "tags"):
                yield from _fixed(member)
    elif isinstance(value, list):
        for item in value:
            yield from _fixed(item)


class _Writer:
    """Writes the formats of one structural tag. Each rule gets a unique name."""

    def __init__(self, lark: LarkGrammar) -> None:
        self._lark, self._num_rules = lark, 0

    def write(self, value: Mapping[str, Any]) -> str:
        """Return the expression of one format. It may be empty, for an empty text."""
        kind = value["type"]
        if kind in ("sequence", "or"):
            parts = [self._grouped(element) for element in value["elements"]]
            return " ".join(parts) if kind == "sequence" else one_of(part or _NOTHING for part in parts)
        if kind in _REPEATED:
            inner = self._grouped(value["content"])
            return inner + _REPEATED[kind] if inner else ""
        if kind == "tag":
            return self._tag(value)
        if kind == "triggered_tags":
            return self._triggered(value)
        if kind == "tags_with_separator":
            return self._separated(value)
        return self._leaf(value)

    def _leaf(self, value: Mapping[str, Any]) -> str:
        kind = value["type"]
        if kind == "const_string":
            return self._lark.fixed(value["value"])
        if kind == "json_schema":
            return json_rule(value["json_schema"])
        if kind == "regex":
            return regex_rule(value["pattern"])
        if kind == "grammar":
            return self._lark.user_grammar(self._name("tag_grammar"), lark_of(value["grammar"]))
        return self._words()

    def _tag(self, tag: Mapping[str, Any], trigger: str = "") -> str:
        """Return the expression of a tag after the `trigger` that its begin text starts with."""
        begin, ends = self._lark.fixed(tag["begin"][len(trigger) :]), ends_of(tag)
        if tag["content"]["type"] == "any_text" and all(ends):
            closed = one_of(self._lark.text_until(self._name("tag_text"), end) for end in ends)
        else:
            closed = f"{self._grouped(tag['content'])} {one_of(self._lark.fixed(end) or _NOTHING for end in ends)}"
        return f"{begin} {closed}"

    def _triggered(self, value: Mapping[str, Any]) -> str:
        whole = [self._rule("tag", self._tag(tag)) for tag in value["tags"]] if value.get("at_least_one") else []
        if whole and value.get("stop_after_first"):
            return one_of(whole)
        behind: list[str] = []
        for trigger in value["triggers"]:
            tags = [tag for tag in value["tags"] if tag["begin"].startswith(trigger)]
            for tag in tags:
                if self._lark.cuts_token(tag["begin"], len(trigger)):
                    reason = f"{trigger!r:.80} ends inside a special token"
                    raise InvalidRequest(FIELD, reason, "let the trigger end with the token")
            until = self._lark.text_until(self._name("tag_words"), trigger)
            inside = one_of(self._rule("tag", self._tag(tag, trigger)) for tag in tags)
            behind.append(f"({until} {inside})")
        after = one_of(behind)
        if value.get("stop_after_first"):
            return f"({after} | {self._words()})"
        return f"{one_of(whole) if whole else ''} {after}* {self._words()}"

    def _separated(self, value: Mapping[str, Any]) -> str:
        tag = self._rule("tag", one_of(self._rule("tag", self._tag(tag)) for tag in value["tags"]))
        several = tag
        if not value.get("stop_after_first"):
            several = f"({tag} ({self._lark.fixed(value['separator'])} {tag})*)"
        return several if value.get("at_least_one") else f"{several}?"

    def _grouped(self, value: Mapping[str, Any]) -> str:
        inner = self.write(value).strip()
        return f"({inner})" if inner else ""

    def _words(self) -> str:
        return self._lark.rule(self._name("TAG_WORDS"), self._lark.words)

    def _rule(self, name: str, expression: str) -> str:
        return self._lark.rule(self._name(name), expression)

    def _name(self, name: str) -> str:
        self._num_rules += 1
        return f"{name}_{self._num_rules}"
