"""Structural tags: free text in which certain tags begin a part that follows a schema. Names are as in vLLM and SGLang.

Two forms are accepted. The older form lists `structures` and `triggers`; the newer form is a tree of formats. The older
form is converted to `triggered_tags` of the newer form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.types.errors import InvalidRequest

MAX_DEPTH = 16  # nesting depth of formats
MAX_TAGS = 128  # in one list of tags or triggers, because each trigger is compared with all others
MEMBERS: dict[str, dict[str, type | tuple[type, ...]]] = {  # of each kind of format
    "const_string": {"value": str},
    "json_schema": {"json_schema": (dict, bool)},
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "any_text": {},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "optional": {"content": dict},
    "plus": {"content": dict},
    "star": {"content": dict},
    "tag": {"begin": str, "content": dict, "end": (str, list)},
    "triggered_tags": {"triggers": list, "tags": list},
    "tags_with_separator": {"tags": list, "separator": str},
}
_FLAGS = {"at_least_one": False, "stop_after_first": False}
_DEFAULTS: dict[str, dict[str, Any]] = {  # members that may be left out
    "json_schema": {"style": "json", "any_order": False, "max_whitespace_cnt": None},
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "triggered_tags": {**_FLAGS, "excludes": []},
    "tags_with_separator": _FLAGS,
}
_TYPE_NAMES = {str: "text", dict: "an object", list: "a list", bool: "true or false"}
OLD_MEMBERS = ("structures", "triggers", "at_least_one")
_FORMS = 'send {"structures": [{"begin", "schema", "end"}], "triggers": [...]} or {"format": {...}}'


def read_structural_tag(where: str, value: object, limit: int) -> str:
    """Return a structural tag as the JSON text of the newer form. Raises InvalidRequest naming the member at fault. A
    tag of more than `limit` characters is refused before anything else is checked."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
        size = len(json.dumps(read, allow_nan=False, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(where, f"is no JSON: {error}", _FORMS) from None
    if size > limit:
        raise InvalidRequest(where, f"has {size} characters, limit {limit}", "send a smaller one")
    if not isinstance(read, Mapping):
        raise InvalidRequest(where, "must be an object, or its JSON text", _FORMS)
    if read.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequest(f"{where}.type", "must be structural_tag", _FORMS)
    if "format" in read:
        _refuse_others(where, read, ("type", "format"))
        _check(f"{where}.format", read["format"], 0, is_last=True)
        found = read["format"]
    else:
        found = _from_old(where, read)
    return json.dumps({"type": "structural_tag", "format": found}, ensure_ascii=False)


def ends_of(tag: Mapping[str, Any]) -> list[str]:
    """Return the texts that can end a tag."""
    return [tag["end"]] if isinstance(tag["end"], str) else list(tag["end"])


def _from_old(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form to `triggered_tags` of the newer form."""
    _refuse_others(where, value, ("type", *OLD_MEMBERS))
    tags: list[dict[str, Any]] = []
    for place, item in enumerate(_filled(where, "structures", value)):
        path = f"{where}.structures[{place}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(path, "must be an object with begin, schema and end")
        _refuse_others(path, item, ("begin", "schema", "end"))
        schema = True if item.get("schema") is None else item["schema"]
        if schema is not True and not isinstance(schema, Mapping):
            raise InvalidRequest(f"{path}.schema", "must be an object", "send a JSON schema")
        for name in ("begin", "end"):
            if not isinstance(item.get(name), str):
                raise InvalidRequest(f"{path}.{name}", "must be text" if name in item else "is missing", "send text")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    found: dict[str, Any] = {"type": "triggered_tags", "triggers": _filled(where, "triggers", value), "tags": tags}
    found["at_least_one"] = value.get("at_least_one") or False
    _check_flags(where, found)
    _check_triggers(where, found, "structures")
    return found


def _check(where: str, value: object, depth: int, *, is_last: bool) -> None:
    """Raise InvalidRequest if a format is unknown or cannot be followed. `is_last`: nothing comes after it."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(where, "must be an object with a type", f"types: {', '.join(MEMBERS)}")
    if depth > MAX_DEPTH:
        raise InvalidRequest(where, f"is nested deeper than {MAX_DEPTH} formats", "flatten it")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in MEMBERS:
        shown = "is missing" if kind is None else f"{kind!r:.80} is not supported here"
        raise InvalidRequest(f"{where}.type", shown, f"use one of {', '.join(MEMBERS)}")
    _check_members(where, kind, value)
    ends_free = kind == "any_text" or (kind == "triggered_tags" and not value.get("stop_after_first"))
    if ends_free and not is_last:
        reason = f"{kind} has no end, so nothing can follow it"
        raise InvalidRequest(where, reason, "put it last, or any_text into a tag with an end")
    if kind in ("sequence", "or"):
        elements = _filled(where, "elements", value)
        for place, element in enumerate(elements):
            last = is_last and (kind == "or" or place == len(elements) - 1)
            _check(f"{where}.elements[{place}]", element, depth + 1, is_last=last)
    elif kind in ("optional", "plus", "star"):
        _check(f"{where}.content", value["content"], depth + 1, is_last=is_last and kind == "optional")
    elif kind == "tag":
        _check_tag(where, value, depth, is_last=is_last)
    elif kind in ("triggered_tags", "tags_with_separator"):
        for place, tag in enumerate(_filled(where, "tags", value)):
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                raise InvalidRequest(f"{where}.tags[{place}]", "must be a tag", "send begin, content and end")
            _check_members(f"{where}.tags[{place}]", "tag", tag)
            _check_tag(f"{where}.tags[{place}]", tag, depth + 1, is_last=False)
        _check_flags(where, value)
    if kind == "triggered_tags":
        _check_triggers(where, value, "tags")


def _check_members(where: str, kind: str, value: Mapping[str, Any]) -> None:
    defaults = _DEFAULTS.get(kind, {})
    _refuse_others(where, value, ("type", *MEMBERS[kind], *defaults))
    for name, types in MEMBERS[kind].items():
        if name not in value:
            raise InvalidRequest(f"{where}.{name}", "is missing", f"{kind} needs it")
        if not isinstance(value[name], types):
            given = types if isinstance(types, tuple) else (types,)
            raise InvalidRequest(f"{where}.{name}", f"must be {' or '.join(_TYPE_NAMES[one] for one in given)}")
    if kind == "json_schema" and value["json_schema"] is False:
        raise InvalidRequest(f"{where}.json_schema", "is false, which nothing matches", "send a JSON schema")
    if kind in ("regex", "grammar") and not all(value[name] for name in MEMBERS[kind]):
        raise InvalidRequest(where, "is empty", "send at least one character")
    for name, default in defaults.items():
        if name not in _FLAGS and value.get(name) not in (None, default):
            raise InvalidRequest(f"{where}.{name}", "is not supported yet", "leave it out")


def _check_tag(where: str, tag: Mapping[str, Any], depth: int, *, is_last: bool) -> None:
    ends = ends_of(tag)
    if not ends or not all(isinstance(end, str) for end in ends):
        raise InvalidRequest(f"{where}.end", "must be text or a list of texts")
    if isinstance(tag["content"], Mapping) and tag["content"].get("type") == "any_text" and all(ends):
        _check_members(f"{where}.content", "any_text", tag["content"])
    else:
        _check(f"{where}.content", tag["content"], depth + 1, is_last=is_last and not any(ends))


def _check_flags(where: str, value: Mapping[str, Any]) -> None:
    for name in _FLAGS:
        if not isinstance(value.get(name, False), bool):
            raise InvalidRequest(f"{where}.{name}", "must be true or false")


def _check_triggers(where: str, value: Mapping[str, Any], holder: str) -> None:
    """Raise InvalidRequest unless every tag begins with one of the triggers, and every trigger begins a tag."""
    triggers: list[Any] = _filled(where, "triggers", value)
    for place, trigger in enumerate(triggers):
        path = f"{where}.triggers[{place}]"
        if not isinstance(trigger, str) or not trigger:
            raise InvalidRequest(path, "must be a non-empty text")
        if any(trigger in other for other in triggers[:place] + triggers[place + 1 :] if isinstance(other, str)):
            raise InvalidRequest(path, "is part of another trigger", "leave the other one out")
        if not any(tag["begin"].startswith(trigger) for tag in value["tags"]):
            raise InvalidRequest(path, f"begins none of {holder}", "leave it out, or correct it")
    for place, tag in enumerate(value["tags"]):
        if not tag["begin"].startswith(tuple(triggers)):
            reason = "does not begin with any of triggers"
            raise InvalidRequest(f"{where}.{holder}[{place}].begin", reason, "add the text it begins with to triggers")


def _filled(where: str, name: str, value: Mapping[str, Any]) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{where}.{name}", "is missing" if found is None else "must be a non-empty list", _FORMS)
    if len(found) > MAX_TAGS:
        raise InvalidRequest(f"{where}.{name}", f"has {len(found)} entries, limit {MAX_TAGS}", "send fewer")
    return found


def _refuse_others(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequest(f"{where}.{name!s:.80}", "is not known here", f"known are: {', '.join(known)}")
