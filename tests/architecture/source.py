"""The source tree as the architecture tests see it: parsed once, by module name."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Module:
    name: str  # "quire.engine.core"
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def where(self) -> str:
        return str(self.path.relative_to(SOURCE))

    @property
    def package(self) -> str:
        """The floor it lives on: "engine" of quire.engine.core; "" for the top."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def imports(self) -> list[tuple[str, int]]:
        """Every imported module with its line, in functions and under TYPE_CHECKING too."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.where}:{node.lineno}: relative import"
                assert node.module is not None
                found.append((node.module, node.lineno))
        return found

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
                else:
                    walk(child, prefix)

        walk(self.tree, "")
        return found


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted((SOURCE / "quire").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(text, str(path)), text.count("\n")))
    return tuple(found)
