"""What must not appear in the source at all."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import Module, modules

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "time.time",  # the wall clock jumps; deadlines and durations use monotonic or perf_counter
    "datetime.now",
    "datetime.datetime.now",
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
ENVIRONMENT_HOME = "quire.config.environment"
MAX_ENVIRONMENT_VARIABLES = 9


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_nothing_that_runs_foreign_bytes_is_imported(module: Module) -> None:
    assert not [f"{module.where}:{line} {n}" for n, line in module.imports() if n.partition(".")[0] in FORBIDDEN_IMPORTS]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_no_forbidden_function_is_called(module: Module) -> None:
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    assert not [f"{module.where}:{call.lineno} {_dotted(call.func)}" for call in calls if _dotted(call.func) in FORBIDDEN_CALLS]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_forbidden_functions_are_not_imported_by_name(module: Module) -> None:
    hidden = {("time", "time"), ("torch", "load"), ("torch", "save"), ("os", "environ"), ("os", "getenv")}
    found = [
        f"{module.where}:{node.lineno} from {node.module} import {alias.name}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in hidden
    ]
    assert not found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_the_environment_is_read_in_one_file(module: Module) -> None:
    reads = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and _dotted(node) in ENVIRONMENT]
    if module.name != ENVIRONMENT_HOME:
        assert not [f"{module.where}:{node.lineno}" for node in reads]


def test_there_are_fewer_than_ten_environment_variables() -> None:
    names = {
        node.value
        for module in modules()
        if module.name == ENVIRONMENT_HOME
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("QUIRE_")
    }
    assert len(names) <= MAX_ENVIRONMENT_VARIABLES


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_nothing_is_left_for_later(module: Module) -> None:
    text = module.path.read_text(encoding="utf-8")
    assert not [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]
