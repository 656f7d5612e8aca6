"""The pre-tokenizers of byte-level BPE models, by their names in `tokenizer.ggml.pre` of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_SIGN_AND_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_UNPUNCTUATED = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CASED_LETTERS = (
    # the cased letters of the Unicode version that DeepSeek's tokenizer was made with
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _words(digits: str, *, contractions: str = _CONTRACTIONS + "|", letters: str = r"\p{L}", marks: str = "") -> str:
    """Return the pattern of the GPT-4 family: a word may begin with one other character. `digits` is the pattern of
    digits."""
    signs = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{signs}|{_SPACES}"


def _cased_words(
    digits: str, *, contractions: str = _CONTRACTIONS + "?", signs_end: str = r"[\r\n/]*", but: str = ""
) -> str:
    """Return the pattern of the GPT-4o family: a change from lower to upper case ends a word."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    title, shout = f"{start}{upper}*{lower}+{contractions}", f"{start}{upper}+{lower}*{contractions}"
    return rf"{title}|{shout}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs_end}|{_SPACES}"


@dataclass(frozen=True, slots=True)
class _Regex:
    pattern: str


_Step = _Regex | Literal["digits", "digit runs", "punctuation", "gpt-2 words"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The pre-tokenizer of one model family, and defaults of its tokenizer that GGUF metadata does not contain."""

    steps: tuple[_Step, ...]
    nfc: bool = False  # normalize text to Unicode NFC first
    ignore_merges: bool = False  # a word that is a token is not split, even if merges do not build it
    add_bos: bool = False  # the default of tokenizer.ggml.add_bos_token
    add_eos: bool = False  # the default of tokenizer.ggml.add_eos_token

    def build(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(list(self._parts()))

    def _parts(self) -> Iterator[pre_tokenizers.PreTokenizer]:
        for step in self.steps:
            if isinstance(step, _Regex):
                yield pre_tokenizers.Split(Regex(step.pattern), "isolated")
            elif step == "punctuation":
                yield pre_tokenizers.Punctuation("contiguous")
            elif step == "gpt-2 words":
                yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            else:
                yield pre_tokenizers.Digits(individual_digits=step == "digits")
        if "gpt-2 words" not in self.steps:
            yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _regexes(*patterns: str) -> Scheme:
    return Scheme(tuple(_Regex(pattern) for pattern in patterns))


def _then_digits(scheme: Scheme) -> Scheme:
    return replace(scheme, steps=(*scheme.steps, "digits"))


_GPT2 = Scheme(("gpt-2 words",))
_SINGLE_DIGITS = Scheme(("digits", "gpt-2 words"))
_FALCON = Scheme(("punctuation", "gpt-2 words", "digit runs", _Regex("[0-9][0-9][0-9]")))
_THREE_DIGITS = _regexes(_words(r"\p{N}{1,3}"))
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, add_bos=True)
_ONE_DIGIT = _regexes(_words(r"\p{N}"))
_GPT4O = _regexes(_cased_words(r"\p{N}{1,3}"))
_DEEPSEEK3 = _regexes(
    r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_ASCII_SIGN_AND_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = _regexes(_UNPUNCTUATED)


_TEKKEN = replace(_regexes(_cased_words(r"\p{N}", contractions="")), ignore_merges=True, add_bos=True)
_QWEN35 = _regexes(_words(r"\p{N}", letters=r"[\p{L}\p{M}]", marks=r"\p{M}"))
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_AND_HANGUL,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL)
_KIMI = r"[\p{Han}]+|" + _cased_words(r"\p{N}{1,3}", signs_end=r"[\r\n]*", but=r"&&[^\p{Han}]")
_LING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

_FAMILIES: tuple[tuple[Scheme, str], ...] = (
    (_FALCON, "default falcon"),
    (_GPT2, "gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert"),
    (replace(_GPT2, add_bos=True, add_eos=True), "roberta-bpe"),
    (replace(_GPT2, nfc=True), "mpt olmo"),
    (_SINGLE_DIGITS, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (replace(_SINGLE_DIGITS, nfc=True), "command-r"),
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_THREE_DIGITS, "dbrx smaug-bpe chatglm-bpe"),
    (replace(_THREE_DIGITS, ignore_merges=True), "glm4 glm5"),
    (replace(_ONE_DIGIT, nfc=True), "qwen2 stablelm2 megrez"),
    (_ONE_DIGIT, "deepseek-r1-qwen hunyuan grok-2 solar-open kormo"),
    (_QWEN35, "qwen35"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
    (_TEKKEN, "tekken"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_then_digits(_regexes(*_DEEPSEEK_LLM)), "deepseek-llm"),
    (_then_digits(_regexes(*_DEEPSEEK_CODER)), "deepseek-coder"),
    (_BLOOM, "bloom poro-chat gpt3-finnish"),
    (_then_digits(_BLOOM), "viking"),
    (_regexes(_KIMI), "kimi-k2"),
    (_regexes(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), "superbpe"),
    (_regexes(_LING), "bailingmoe bailingmoe2 llada-moe"),
    (_regexes(_SEED), "seed-coder"),
)
SCHEMES: dict[str, Scheme] = {name: scheme for scheme, names in _FAMILIES for name in names.split()}
