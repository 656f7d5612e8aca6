"""What must not appear in the source at all."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import Module, dotted, modules, parse

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.hub.load",  # runs a repository's code
    "torch.serialization.load",
    "torch.package.PackageImporter",
    "time.time",  # the wall clock jumps; deadlines and durations use monotonic or perf_counter
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
ENVIRONMENT_HOME = "quire.config.environment"
MAX_ENVIRONMENT_VARIABLES = 9


def _forbidden_calls(module: Module) -> list[str]:
    return [
        f"{module.where}:{node.lineno} {name}"
        for name, node in module.calls
        if name in FORBIDDEN_CALLS or (name == "numpy.load" and _may_unpickle(node))
    ]


def _may_unpickle(node: ast.Call) -> bool:
    """Whether numpy.load is told anything but allow_pickle=False."""
    told = [keyword.value for keyword in node.keywords if keyword.arg in ("allow_pickle", None)]
    return len(node.args) > 2 or any(not (isinstance(value, ast.Constant) and value.value is False) for value in told)


def test_nothing_that_runs_foreign_bytes_is_imported() -> None:
    found = [(m.where, line) for m in modules() for n, line in m.imports if n.partition(".")[0] in FORBIDDEN_IMPORTS]
    assert not found


def test_no_forbidden_function_is_called() -> None:
    assert not [call for module in modules() for call in _forbidden_calls(module)]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import hub\nhub.load(name)",
        "from torch.serialization import load as read\nread(path)",
        "import torch\ntorch.serialization.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, None, flag)",
        "import numpy as np\nnp.load(path, **options)",
        "import time\ntime.time()",
    ],
)
def test_a_forbidden_call_is_seen_under_any_name(text: str) -> None:
    assert len(_forbidden_calls(parse(text))) == 1


def test_numpy_may_load_what_is_no_pickle() -> None:
    assert not _forbidden_calls(parse("import numpy as np\nnp.load(path, allow_pickle=False)\nnp.load(path)"))


def test_only_the_front_door_and_the_compiling_child_import_by_a_computed_name() -> None:
    """A child that compiles kernels is told the module of each; it takes only those of our own kernels."""
    computed = {module.name for module in modules() for name, _ in module.dynamic_imports if name is None}
    assert computed == {"quire", "quire.kernels.triton.compile_process", "quire.runtime.models.registry"}
    assert parse("import importlib\nimportlib.import_module(name)").dynamic_imports == [(None, 2)]


def test_forbidden_functions_are_not_imported_by_name() -> None:
    hidden = {("time", "time"), ("torch", "load"), ("torch", "save"), ("os", "environ"), ("os", "getenv")}
    found = [
        f"{module.where}:{node.lineno} from {node.module} import {alias.name}"
        for module in modules()
        for node in module.nodes
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
        for node in module.nodes
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT
    ]
    assert not reads


def _devices_by_name(module: Module) -> list[str]:
    """Return the calls that make a torch.device of a name which is not written there."""
    return [
        f"{module.where}:{node.lineno}"
        for name, node in module.calls
        if name == "torch.device" and not isinstance(node.args[0], ast.Constant)
    ]


def test_devices_of_a_configuration_are_converted_in_one_place() -> None:
    """`torch_device` gives "cuda" an index, without which torch.cuda.set_device refuses it."""
    assert {place.split(":")[0] for m in modules() for place in _devices_by_name(m)} == {"quire/runtime/device.py"}
    assert len(_devices_by_name(parse("from torch import device\ndevice(name)"))) == 1


def test_there_are_fewer_than_ten_environment_variables() -> None:
    names = {
        node.value
        for module in modules()
        if module.name == ENVIRONMENT_HOME
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("QUIRE_")
    }
    assert len(names) <= MAX_ENVIRONMENT_VARIABLES


def test_nothing_is_left_for_later() -> None:
    words = ("TODO", "FIXME", "XXX", "raise NotImplementedError")
    texts = [(module.where, module.path.read_text(encoding="utf-8")) for module in modules()]
    assert not [(where, word) for where, text in texts for word in words if word in text]
