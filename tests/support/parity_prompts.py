"""Varied prompts for comparing engines: prose, code, unicode, digits, white space, one token, thousands of tokens."""

from __future__ import annotations

SHORT = [
    "a",
    " ",
    "\n",
    "7",
    "!",
    "Once upon a time",
    "The capital of France is",
    "import numpy as np\n",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#include <stdio.h>\nint main(void) {\n",
    "fn main() {\n    let mut total = 0;\n",
    '{"name": "Ada", "born": 1815, "fields": [',
    "<html>\n<head>\n<title>",
    "for i in range(10):\n    print(i)\n# Output:\n",
    "Les premières neiges tombaient sur",
    "Der schnelle braune Fuchs springt",
    "El sentido de la vida es",
    "Привет, как дела? Сегодня",
    "日本の首都は東京です。次に大きい都市は",
    "你好，世界。今天的天气",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "🙂🙃😀 emoji party 🎉🎉",
    "naïve café résumé — “quoted” … ½ ¼",
    "3.14159265358979 2.71828182845904 1.41421356",
    "1, 1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "\t\ttabs and   spaces   ",
    "ALL CAPS SHOUTING ABOUT NOTHING",
    "Q: What is the boiling point of water?\nA:",
    "To be, or not to be, that is",
    "- item one\n- item two\n- item",
    "| name | age |\n|---|---|\n| Bob |",
    "Dear Sir or Madam,\n\nI am writing to",
    "It was a dark and stormy night; the rain fell in torrents",
]

_PARAGRAPH = (
    "The library opened at nine, and by ten every table held a reader with a different kind of silence. "
    "One copied figures from an almanac of 1893; another, page by page, looked for a map that was said to be false. "
)
_CODE = "def step_{i}(value):\n    if value % {j} == 0:\n        return value // {j}\n    return 3 * value + {i}\n\n"

LONG = [
    _PARAGRAPH * 6,
    "".join(_CODE.format(i=i, j=i % 7 + 2) for i in range(14)),
]
VERY_LONG = [  # about two thousand tokens each
    _PARAGRAPH * 44,
    "".join(_CODE.format(i=i, j=i % 9 + 2) for i in range(46)),
]
ALL = [*SHORT, *LONG, *VERY_LONG]
