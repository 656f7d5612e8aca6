"""Loads the tokenizer of a Hugging Face directory: tokenizer.json or vocab.txt, and the configuration files beside
it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders

from quire.runtime.loading.mapping import refuse_pointer
from quire.serving.text.edges import set_edges
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.word_pieces import read_word_pieces
from quire.types.errors import ModelLoadError

MAX_TEXT_BYTES = 64 << 20
_TEMPLATES = ("default", "tool_use")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")


def build_hf_tokenizer(directory: Path) -> tuple[Tokenizer, SpecialTokens]:
    """Load the tokenizer in `directory`, and return it with its bos and eos tokens and its chat template. Raises
    ModelLoadError."""
    config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    if not (directory / "tokenizer.json").is_file() and (text := _read_text(directory / "vocab.txt")) is not None:
        tokenizer = _read_words(text, config, directory / "vocab.txt")
    else:
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
    _add_declared_tokens(tokenizer, config, directory / "tokenizer_config.json")
    bos, eos = _named_id(tokenizer, config, "bos_token"), _named_id(tokenizer, config, "eos_token")
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        set_edges(tokenizer, bos if config.get("add_bos_token") else None, eos if config.get("add_eos_token") else None)
    model_config = _read_json(directory / "config.json")
    if bos is None:
        bos = next(_ids(model_config, "bos_token_id", directory / "config.json"), None)
    ends = [eos] if eos is not None else []  # first, because templates write the first one as eos_token
    path = directory / "generation_config.json"
    ends += _ids(_read_json(path), "eos_token_id", path)
    ends = ends or [*_ids(model_config, "eos_token_id", directory / "config.json")]
    return tokenizer, SpecialTokens(bos, tuple(dict.fromkeys(ends)), _chat_template(directory, config))


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        fix = "download it, or convert a slow tokenizer (transformers: save_pretrained of a fast one), or name "
        fix += "a folder that has one as `tokenizer`"
        raise ModelLoadError(
            str(path), "no such file, and there is no vocab.txt of a WordPiece tokenizer either", fix=fix
        )
    with path.open("rb") as file:
        refuse_pointer(file.read(64), str(path))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ModelLoadError(str(path), f"is not a tokenizer: {error}", fix="fetch the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.decoder, decoders.WordPiece):  # without the cleanup of spaces, so that decoding is exact
        tokenizer.decoder = decoders.WordPiece(tokenizer.decoder.prefix, cleanup=False)
    return tokenizer


def _read_words(text: str, config: dict[str, Any], path: Path) -> Tokenizer:
    """Build a WordPiece tokenizer from vocab.txt, which old BERT folders have instead of tokenizer.json."""
    named = {
        name: _content(config.get(name)) or f"[{name[:3].upper()}]" for name in ("unk_token", "cls_token", "sep_token")
    }
    tokenizer = read_word_pieces(text, config | named, str(path))
    missing = [token for token in named.values() if tokenizer.token_to_id(token) is None]
    if missing:
        raise ModelLoadError(str(path), f"does not hold the token {missing[0]!r:.80}", fix="fetch the file again")
    usual = ["[PAD]", "[MASK]"]
    known = [token for token in (*named.values(), *usual) if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in known])
    cls_id, sep_id = (tokenizer.token_to_id(named[name]) for name in ("cls_token", "sep_token"))
    set_edges(tokenizer, cls_id, sep_id)
    return tokenizer


def _read_text(path: Path) -> str | None:
    """Return the text of a file, or None if it does not exist. Raises ModelLoadError."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ModelLoadError(str(path), f"is larger than {MAX_TEXT_BYTES} bytes", fix="fetch the file again")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ModelLoadError(str(path), f"cannot be read: {error.strerror}", fix="check its permissions") from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(str(path), f"is not UTF-8 text: {error.reason}", fix="fetch the file again") from None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(str(path), f"is not valid JSON: {error}", fix="fetch the file again") from None
    if not isinstance(found, dict):
        raise ModelLoadError(str(path), "must hold a JSON object", fix="fetch the file again")
    return found


def _content(token: object) -> str | None:
    """Return a token's text. Configurations write a token as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_id(tokenizer: Tokenizer, config: dict[str, Any], name: str) -> int | None:
    content = _content(config.get(name))
    return None if content is None else tokenizer.token_to_id(content)


def _add_declared_tokens(tokenizer: Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Register added tokens that only the configuration declares. Raises ModelLoadError if their ids differ from the
    declared ones."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(str(index).isdecimal() for index in declared):
        raise ModelLoadError(str(path), "added_tokens_decoder must map token ids to tokens")
    for index in sorted(declared, key=int):
        entry = declared[index]
        if (content := _content(entry)) is None or content in known:
            continue
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(index):
            found = tokenizer.token_to_id(content)
            reason = f"added_tokens_decoder has {content!r:.80} at {index}, tokenizer.json would have it at {found}"
            raise ModelLoadError(str(path), reason, fix="fetch both files from one revision")
        known.add(content)
    extra = config.get("additional_special_tokens") or []
    for content in map(_content, [*(config.get(name) for name in _NAMED), *(extra if isinstance(extra, list) else [])]):
        if content is not None and content not in known and tokenizer.token_to_id(content) is not None:
            tokenizer.add_special_tokens([AddedToken(content, normalized=False, special=True)])


def _ids(config: dict[str, Any], key: str, path: Path) -> Iterator[int]:
    stored = config.get(key)
    for index in stored if isinstance(stored, list) else [] if stored is None else [stored]:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ModelLoadError(str(path), f"{key} must hold token ids, got {index!r:.80}")
        yield index


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template: chat_template.jinja, or else chat_template.json (used by vision models), or else that
    of tokenizer_config.json, or None. Of several named ones it is the default, and tool_use for requests with tools."""
    own = _read_text(directory / "chat_template.jinja")
    if own is not None:
        return _with_tools(own, _read_text(directory / "additional_chat_templates" / "tool_use.jinja"))
    stored = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(stored, list):
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
        return _with_tools(*(one if isinstance(one := named.get(name), str) else None for name in _TEMPLATES))
    return stored if isinstance(stored, str) else None


def _with_tools(default: str | None, tools: str | None) -> str | None:
    """Return one template of two. A plus keeps the white space beside a tag, and a template's last line break is
    dropped as if it stood alone."""
    if default is None or tools is None:
        return default
    tools, default = tools.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools +%}}{tools}{{%+ else +%}}{default}{{%+ endif %}}"
