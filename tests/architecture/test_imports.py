"""Imports go down the stairs only."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.source import SOURCE, Module, modules

# package: what it may import of the others. types and config may be imported by all.
MAY_IMPORT = {
    "types": {"types"},
    "config": {"types", "config"},
    "kernels": {"kernels"},
    "runtime": {"types", "config", "engine.executor", "runtime", "kernels"},
    "engine": {"types", "config", "engine"},
    "serving": {"types", "config", "engine", "runtime", "serving"},
    "": {"types", "serving"},
    "__main__": {"serving"},
}
WITHOUT_TORCH = ("types", "config", "engine")
HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "transformers", "gguf", "huggingface_hub")
LANGUAGE = set(sys.stdlib_module_names) | {"quire"}
DEPENDENCIES = {"torch", "numpy", "tokenizers", "safetensors", "jinja2"}
OPTIONAL = {"huggingface_hub", "triton"}


def _is_allowed(target: str, allowed: set[str]) -> bool:
    """Whether quire.<target> lies in one of the allowed packages or modules."""
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_module_imports_only_from_its_own_floor_and_those_below(module: Module) -> None:
    allowed = MAY_IMPORT[module.package]
    wrong = [
        f"{module.where}:{line} imports {name}"
        for name, line in module.imports()
        if name.startswith("quire.") and not _is_allowed(name.removeprefix("quire."), allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_only_declared_packages_are_imported(module: Module) -> None:
    top_level = {(name.partition(".")[0], line) for name, line in module.imports()}
    unknown = [f"{module.where}:{line} {name}" for name, line in top_level if name not in LANGUAGE | DEPENDENCIES | OPTIONAL]
    assert not unknown


def test_the_floors_that_decide_never_import_torch() -> None:
    wrong = [
        f"{module.where}:{line}"
        for module in modules()
        if module.package in WITHOUT_TORCH
        for name, line in module.imports()
        if name.partition(".")[0] == "torch"
    ]
    assert not wrong


def test_every_package_has_a_rule() -> None:
    assert {module.package for module in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import quire; dir(quire)", HEAVY),
        ("import quire.serving.cli", HEAVY),
        ("import quire.engine.core", ("torch", "tokenizers", "safetensors", "jinja2", "transformers")),
        ("import quire.config.resolve", ("torch", "tokenizers", "safetensors", "jinja2")),
        ("import quire.runtime.loading.resolve", ("torch", "huggingface_hub")),
        ("import quire.serving.llm", tuple(OPTIONAL)),
    ],
)
def test_an_import_stays_light(statement: str, forbidden: tuple[str, ...]) -> None:
    program = f"import json, sys; sys.path.insert(0, {str(SOURCE)!r}); {statement}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(forbidden) & set(json.loads(done.stdout))
