"""Imports go down the stairs only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.architecture.source import SOURCE, Module, modules, parse

# package: what it may import of the others. types and config may be imported by all.
MAY_IMPORT = {
    "types": {"types"},
    "config": {"types", "config"},
    "kernels": {"kernels"},
    "runtime": {"types", "config", "engine.executor", "runtime", "kernels"},
    "engine": {"types", "config", "engine"},
    "simulator": {"types", "config", "engine", "simulator"},
    "observability": {"types", "config", "observability"},
    "serving": {"types", "config", "engine", "runtime", "simulator", "observability", "serving"},
    "": {"types", "serving"},
    "__main__": {"serving"},
}
WITHOUT_TORCH = ("types", "config", "engine", "simulator")
HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "transformers", "gguf", "huggingface_hub")
LANGUAGE = set(sys.stdlib_module_names) | {"quire"}
DEPENDENCIES = {"torch", "numpy", "tokenizers", "safetensors", "jinja2"}
# Packages an installation may lack, and the modules that may import them at their top: none of these is imported by
# the offline engine, as the tests of light imports show.
SERVER_MODULES = (
    "engine.command_messages",
    "engine.messages",
    "engine.transport",
    "serving.process.control",
    "serving.edge",
    "serving.http",
    "serving.process.remote_link",
    "serving.router",
)
OPTIONAL: dict[str, tuple[str, ...]] = {
    "aiohttp": (),
    "cuda": (),
    "PIL": (),
    "flashinfer": (),
    "httptools": SERVER_MODULES,
    "huggingface_hub": (),
    "llguidance": (),
    "msgspec": SERVER_MODULES,
    "opentelemetry": (),
    "prometheus_client": (),
    "ray": ("serving.router.ray_router",),
    "starlette": SERVER_MODULES,
    "triton": ("kernels.triton",),
    "uvicorn": SERVER_MODULES,
    "uvloop": SERVER_MODULES,
    "zmq": SERVER_MODULES,
}


def _climbs(module: Module) -> list[str]:
    """Its imports of other modules than its floor may see; the version may be seen by all."""
    allowed = [f"quire.{name}" for name in (*MAY_IMPORT[module.package], "__version__")]
    return [
        f"{module.where}:{line} imports {name}"
        for name, line in module.imports
        if name.partition(".")[0] == "quire"
        and not any(name == other or name.startswith(f"{other}.") for other in allowed)
    ]


def test_modules_import_only_from_their_own_floor_and_those_below() -> None:
    assert not [climb for module in modules() for climb in _climbs(module)]


@pytest.mark.parametrize(
    "text",
    [
        "import quire",
        "from quire import LLM",
        "from quire import runtime",
        "import quire.runtime.hardware",
        "from quire.serving.llm import LLM",
        "from importlib import import_module\nimport_module('quire.runtime')",
    ],
)
def test_an_import_that_climbs_is_seen_in_any_form(text: str) -> None:
    assert len(_climbs(parse(text))) == 1


def test_a_floor_may_import_itself_and_the_version() -> None:
    assert not _climbs(parse("from quire import __version__, types\nfrom quire.engine.core import EngineCore"))


def test_only_declared_packages_are_imported() -> None:
    known = LANGUAGE | DEPENDENCIES | OPTIONAL.keys()
    unknown = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        for name, line in module.imports
        if name.partition(".")[0] not in known
    ]
    assert not unknown


def test_optional_packages_are_imported_inside_functions_or_where_they_are_at_home() -> None:
    wrong = [
        f"{module.where}:{node.lineno} imports {package}"
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for package in _top_levels(node) & OPTIONAL.keys()
        if not _is_at_home(module, OPTIONAL[package])
    ]
    assert not wrong


def _is_at_home(module: Module, homes: tuple[str, ...]) -> bool:
    name = module.where.removeprefix("quire/").removesuffix(".py").replace("/", ".")
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def _top_levels(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return {name.partition(".")[0] for name in names}


def test_the_floors_that_decide_never_import_torch() -> None:
    assert not [line for module in modules() if module.package in WITHOUT_TORCH for line in _imports_of_torch(module)]


@pytest.mark.parametrize("text", ["import torch", "import importlib\nimportlib.import_module('torch.nn')"])
def test_an_import_of_torch_is_seen_in_any_form(text: str) -> None:
    assert len(_imports_of_torch(parse(text))) == 1


def _imports_of_torch(module: Module) -> list[str]:
    return [f"{module.where}:{line}" for name, line in module.imports if name.partition(".")[0] == "torch"]


SERVE_CONFIG = """
from quire.serving.cli import _parser
from quire.serving.cli.serve import server_config
server_config(_parser("serve").parse_args(["serve"]))
"""


def test_every_package_has_a_rule() -> None:
    assert {module.package for module in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import quire; dir(quire)", HEAVY),
        ("import quire.serving.cli", HEAVY),
        ("import quire.engine.core", ("torch", "tokenizers", "safetensors", "jinja2", "transformers", *OPTIONAL)),
        ("import quire.config.resolve", ("torch", "tokenizers", "safetensors", "jinja2")),
        ("import quire.runtime.loading.resolve", ("torch", "huggingface_hub")),
        ("import quire.serving.llm", ("transformers", "gguf", *OPTIONAL)),
        ("import quire.serving.router.server", ("torch", "transformers", "huggingface_hub", "ray")),
        (
            "import quire.serving.edge",
            ("torch", "transformers", "huggingface_hub", "pydantic", "quire.engine.core"),
        ),
        (SERVE_CONFIG, ("torch", "asyncio", "http.client", "jinja2", "quire.serving.requests")),
        (
            "import quire.serving.process.supervisor",
            ("torch", "numpy", "starlette", "uvicorn", "transformers", "huggingface_hub"),
        ),
    ],
)
def test_an_import_stays_light(statement: str, forbidden: tuple[str, ...]) -> None:
    program = (
        f"import json, sys; sys.path.insert(0, {str(SOURCE)!r})\n{statement}\nprint(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(forbidden) & set(json.loads(done.stdout))
