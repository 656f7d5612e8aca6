"""What the pages name exists: links, files, modules, flags of benchmarks, make targets, and names of the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("src", "docs", "tests", "benchmarks", "tools", "deploy", "examples", ".ci")
CODE = {".py", ".cpp", ".cu", ".cuh", ".h"}
OF_MODELS = {  # files of models and of other programs
    *("1_Pooling/config.json", "adapter_config.json", "config.yaml", "config_sentence_transformers.json"),
    *("generation_config.json", "modules.json", "preprocessor_config.json", "processor_config.json"),
    *("sentence_bert_config.json", "tokenizer.json"),
}
OF_THE_API = {"structured_outputs.json", "/openapi.json"}  # fields and URLs
GIVEN_ON = re.compile(r"'[^']*'")  # a command that a benchmark gets as an argument has flags of its own


def lines_of(page: Path) -> list[tuple[str, str]]:
    """Return the lines of a page, each with its place."""
    text = page.read_text(encoding="utf-8").splitlines()
    return [(f"{page.relative_to(ROOT)}:{number}", line) for number, line in enumerate(text, 1)]


@cache
def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@cache
def files() -> frozenset[str]:
    """Return the paths of all files of the repository."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return frozenset(str(path.relative_to(ROOT)) for path in (*below, *ROOT.glob("*")) if path.is_file())


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Return the modules that the commands of a page run, each with its arguments."""
    text = re.sub(r"\\\n\s*|\n(?=[^`\n]*`)", " ", page.read_text(encoding="utf-8"))
    return re.findall(r"python3?\s+-m\s+((?:quire|benchmarks|tests|tools)[\w.]*\w)([^`\n|]*)", text)


def file_of(module: str) -> Path | None:
    base = ROOT / ("src" if module.startswith("quire") else "") / module.replace(".", "/")
    found = (base.with_suffix(".py"), base / "__main__.py")
    return next((path for path in found if path.is_file()), None)


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for where, line in lines_of(page):
            for path, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", line):
                target = (page.parent / path).resolve() if path else page
                if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
                    broken.append(f"{where}: {path}#{anchor}")
    assert broken == []


def test_every_file_that_a_page_names_exists() -> None:
    ends = {path[at:] for path in files() for at in (0, *(m.end() for m in re.finditer("/", path)))}
    absent = []
    for page in PAGES:
        for where, line in lines_of(page):
            for name in re.findall(r"`([\w./-]+\.(?:py|cpp|cuh?|h|json|md|sh|ya?ml|toml|js))`", line):
                if name not in ends | OF_MODELS | OF_THE_API:
                    absent.append(f"{where}: {name}")
    assert absent == []


def test_every_module_that_a_command_runs_exists_and_has_the_flags() -> None:
    wrong = []
    for page in PAGES:
        for module, arguments in commands_of(page):
            file = file_of(module)
            if file is None:
                wrong.append(f"{page.name}: {module}")
                continue
            source = file.read_text(encoding="utf-8")
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", GIVEN_ON.sub("", arguments)):
                if f'"{flag}"' not in source and flag != "--help" and module.startswith("benchmarks"):
                    wrong.append(f"{page.name}: {module} {flag}")
    assert wrong == []


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        (where, target)
        for page in PAGES
        for where, line in lines_of(page)
        for target in re.findall(r"(?:^ {4}|`)make (?:[A-Z]+=\S+ )*([a-z][\w-]*)", line)
    }
    assert {each for each in named if each[1] not in targets} == set()
    assert len(named) > 20


def test_every_name_of_the_code_in_the_architecture_page_occurs_in_the_code() -> None:
    words = {
        word
        for path in files()
        if Path(path).suffix in CODE
        for word in re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8"))
    }
    page = ROOT / "docs/architecture.md"
    absent = [
        f"{where}: {name}"
        for where, line in lines_of(page)
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`)]*\))?`", line)
        if not set(name.split(".")) <= words | {"py", "cpp", "h", "cu", "cuh", "md", "json"}
    ]
    assert absent == []
