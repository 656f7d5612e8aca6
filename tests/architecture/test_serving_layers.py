"""The packages of the server build on each other in one direction."""

from __future__ import annotations

import pytest

from tests.architecture.source import Module, modules, parse

ROOT = "quire.serving"
# From the lowest to the highest. A package may import itself and those before it.
LAYERS = (
    f"{ROOT}.process",
    f"{ROOT}.dispatch",
    f"{ROOT}.http",
    f"{ROOT}.http.generation",
    f"{ROOT}.http.endpoints",
    f"{ROOT}.edge",
    f"{ROOT}.router",
)


def layer_of(name: str) -> int | None:
    """The layer with the longest name that `name` lies in; None: it is in no layer."""
    found = [place for place, layer in enumerate(LAYERS) if name == layer or name.startswith(f"{layer}.")]
    return max(found, key=lambda place: len(LAYERS[place]), default=None)


def climbs(module: Module) -> list[str]:
    own = layer_of(module.name)
    if own is None:
        return []
    return [
        f"{module.where}:{line} imports {name}"
        for name, line in module.imports
        if (other := layer_of(name)) is not None and other > own
    ]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph.get(waiting.pop(), set()) - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    return [name for name in graph if name in reached(name)]


def test_no_package_of_the_server_imports_one_above_it() -> None:
    assert {layer_of(module.name) for module in modules()} >= set(range(len(LAYERS)))
    assert not [climb for module in modules() for climb in climbs(module)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quire.serving.process.example", "from quire.serving.http.limits import Limits"),
        ("quire.serving.http.example", "from quire.serving.http.endpoints.chat import CHAT"),
        ("quire.serving.http.generation.example", "import quire.serving.http.endpoints.registry"),
    ],
)
def test_an_import_of_a_package_above_is_seen(name: str, text: str) -> None:
    assert len(climbs(parse(text, name))) == 1


def test_no_module_of_the_server_imports_itself_by_a_detour() -> None:
    server = [module for module in modules() if layer_of(module.name) is not None]
    names = {module.name for module in server}
    graph = {module.name: {name for name, _ in module.imports} & names for module in server}
    assert len(graph) > 30
    assert not circles(graph)


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
