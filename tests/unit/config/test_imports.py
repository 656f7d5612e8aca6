"""The settings are read in one order: no module of `config` needs one that needs it."""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.architecture.source import modules


def test_no_module_of_the_settings_imports_itself_by_way_of_another() -> None:
    needed = {
        module.name: [name for name, _ in module.imports if name.startswith("quire.config.")]
        for module in modules()
        if module.package == "config"
    }
    assert "quire.config.resolve" in needed
    TopologicalSorter(needed).prepare()  # raises CycleError
