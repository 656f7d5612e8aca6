"""What must not appear in the source at all."""

from __future__ import annotations

import ast

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


def _calls(module: Module) -> list[tuple[str, int]]:
    return [(_dotted(node.func), node.lineno) for node in ast.walk(module.tree) if isinstance(node, ast.Call)]


def test_nothing_that_runs_foreign_bytes_is_imported() -> None:
    found = [(m.where, line) for m in modules() for n, line in m.imports() if n.partition(".")[0] in FORBIDDEN_IMPORTS]
    assert not found


def test_no_forbidden_function_is_called() -> None:
    assert not [(m.where, line, name) for m in modules() for name, line in _calls(m) if name in FORBIDDEN_CALLS]


def test_forbidden_functions_are_not_imported_by_name() -> None:
    hidden = {("time", "time"), ("torch", "load"), ("torch", "save"), ("os", "environ"), ("os", "getenv")}
    found = [
        f"{module.where}:{node.lineno} from {node.module} import {alias.name}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in hidden
    ]
    assert not found


def test_the_environment_is_read_in_one_file() -> None:
    reads = [
        f"{module.where}:{node.lineno}"
        for module in modules()
        if module.name != ENVIRONMENT_HOME
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and _dotted(node) in ENVIRONMENT
    ]
    assert not reads


def test_there_are_fewer_than_ten_environment_variables() -> None:
    names = {
        node.value
        for module in modules()
        if module.name == ENVIRONMENT_HOME
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("QUIRE_")
    }
    assert len(names) <= MAX_ENVIRONMENT_VARIABLES


def test_nothing_is_left_for_later() -> None:
    words = ("TODO", "FIXME", "XXX", "raise NotImplementedError")
    texts = [(module.where, module.path.read_text(encoding="utf-8")) for module in modules()]
    assert not [(where, word) for where, text in texts for word in words if word in text]
