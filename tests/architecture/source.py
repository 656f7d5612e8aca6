"""The source tree as the architecture tests see it: parsed once, by module name."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
COMPILED = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


@dataclass(frozen=True)
class Module:
    name: str  # "quire.engine.core"
    path: Path
    tree: ast.Module
    num_lines: int

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def where(self) -> str:
        return str(self.path.relative_to(SOURCE))

    @property
    def package(self) -> str:
        """The floor it lives on: "engine" of quire.engine.core; "" for the top."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @cached_property
    def imports(self) -> list[tuple[str, int]]:
        """Every imported module with its line: in functions, under TYPE_CHECKING and by import_module("name") too.

        A name taken from the top package counts as a module of it: it may be one, or lead to one.
        """
        found = [(name, line) for name, line in self.dynamic_imports if name is not None]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.where}:{node.lineno}: relative import"
                assert node.module is not None
                if node.module == "quire":
                    found += [(f"quire.{alias.name}", node.lineno) for alias in node.names]
                else:
                    found.append((node.module, node.lineno))
        return found

    @cached_property
    def dynamic_imports(self) -> list[tuple[str | None, int]]:
        """The modules imported by calling a function, with the line; None where the name is computed."""
        found: list[tuple[str | None, int]] = []
        for name, node in self.calls:
            if name in ("importlib.import_module", "__import__"):
                given = node.args[0] if node.args else None
                literal = given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None
                found.append((literal, node.lineno))
        return found

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """Every call of a name, spelt out in full: `np.load` is numpy.load, and `load` is what was imported as such."""
        known = self._imported_names()
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Call):
                head, dot, rest = dotted(node.func).partition(".")
                found.append((known.get(head, head) + dot + rest, node))
        return found

    def _imported_names(self) -> dict[str, str]:
        """What the names that imports bind stand for."""
        names = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names.update({alias.asname: alias.name for alias in node.names if alias.asname})
            elif isinstance(node, ast.ImportFrom):
                names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        return names

    @cached_property
    def functions(self) -> list[tuple[str, int, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """(qualified name, lines, node) of every function and method."""
        found: list[tuple[str, int, ast.FunctionDef | ast.AsyncFunctionDef]] = []

        def walk(node: ast.AST, prefix: str) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = f"{prefix}{child.name}"
                    found.append((name, (child.end_lineno or child.lineno) - child.lineno + 1, child))
                    walk(child, f"{name}.")
                elif isinstance(child, ast.ClassDef):
                    walk(child, f"{prefix}{child.name}.")
                elif not isinstance(child, ast.expr):  # an expression holds no function with a name
                    walk(child, prefix)

        walk(self.tree, "")
        return found


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute of one; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


@cache
def native_sources() -> dict[str, int]:
    """Lines of every file that is compiled, by its path."""
    paths = [path for path in (SOURCE / "quire").rglob("*") if path.suffix in COMPILED]
    return {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8").count("\n") for path in sorted(paths)}


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted((SOURCE / "quire").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(text, str(path)), text.count("\n")))
    gc.freeze()  # else every search for garbage walks through a million nodes
    return tuple(found)


def parse(text: str, name: str = "quire.engine.example") -> Module:
    """A module that is in no file, to try the rules on."""
    path = SOURCE.joinpath(*name.split(".")).with_suffix(".py")
    return Module(name, path, ast.parse(text), text.count("\n"))
