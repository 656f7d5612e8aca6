"""The import of torch without its meta kernels, each test in a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.runtime import torch_import

BEGIN = """
import sys
from quire.runtime import torch_import
torch_import._GPU_DEVICES = ()
torch_import.defer_modules()
import torch
"""


def failure(program: str) -> str:
    """What a process that runs the program says of its failure; nothing if all its assertions hold."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    return done.stderr if done.returncode else ""


def test_meta_kernels_are_not_loaded_until_they_are_needed() -> None:
    program = (
        BEGIN
        + """
assert "torch._decomp" not in sys.modules
assert torch.ones(3).sum() == 3
from torch._meta_registrations import meta_index_Tensor
assert "torch._decomp" in sys.modules
assert type(sys.modules["torch._meta_registrations"]) is type(sys)
assert torch.ones(4, 5, device="meta")[torch.tensor([0, 1], device="meta")].shape == (2, 5)
"""
    )
    assert failure(program) == ""


def test_other_modules_are_loaded_when_they_are_used() -> None:
    program = (
        BEGIN
        + """
assert "torch.export.exported_program" not in sys.modules
assert "torch.utils.data.dataset" not in sys.modules
assert torch.distributions.Normal(0.0, 1.0).entropy() > 1
from torch.utils.data import DataLoader
assert len(list(DataLoader([1, 2, 3], batch_size=2))) == 2
import torch.export.unflatten
assert callable(torch.export.export)
assert type(sys.modules["torch.quantization"]) is not type(sys)
assert torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])).sum().get_data() == 1
assert torch.quantization.QuantStub()(torch.ones(1)) == 1
assert torch.nn.quantized.Linear and torch.nn.intrinsic.LinearReLU and torch.nn.qat.Linear and torch.nn.quantizable.LSTM
from torch.utils._python_dispatch import get_alias_info
assert get_alias_info(torch.ops.aten.add_.Tensor).outs[0].is_write
import torch.nn.quantized.dynamic
for name in torch_import._DEFERRED[1:]:
    assert type(sys.modules[name]) is type(sys), name
"""
    )
    assert failure(program) == ""


def test_loading_meta_kernels_restores_what_torch_needs() -> None:
    program = (
        BEGIN
        + """
torch_import.load_meta_kernels()
torch_import.load_meta_kernels()
assert "torch._decomp" in sys.modules
assert torch.Generator().manual_seed(3).initial_seed() == 3
"""
    )
    assert failure(program) == ""


@pytest.mark.parametrize("before", ["import torch", "torch_import._GPU_DEVICES = ('/dev/null',)"])
def test_the_import_of_torch_is_unchanged_with_a_gpu_or_if_torch_is_already_imported(before: str) -> None:
    program = BEGIN.replace("torch_import.defer_modules()", before + "\ntorch_import.defer_modules()")
    program += 'assert "torch._decomp" in sys.modules\nassert not isinstance(sys.meta_path[0], torch_import._Finder)'
    assert failure(program) == ""


def test_torch_is_imported_without_resolving_the_file_names_of_all_modules() -> None:
    """What `inspect` finds for a frame is the same, and so it is afterwards."""
    program = """
import inspect, os.path, sys
from quire.runtime.torch_import import find_modules_of_frames
resolved, search, realpath = [], inspect.getmodule, os.path.realpath
os.path.realpath = lambda name, **options: resolved.append(name) or realpath(name, **options)
with find_modules_of_frames():
    import torch
    assert inspect.getmodule(sys._getframe()) is sys.modules["__main__"]
    assert inspect.getmodule(torch.nn.Linear).__name__ == "torch.nn.modules.linear"
assert len(resolved) < 100, len(resolved)
assert inspect.getmodule is search
"""
    assert failure(program) == ""


def test_torch_uses_the_libraries_that_were_opened_early() -> None:
    program = """
from pathlib import Path
from quire.runtime.torch_import import open_libraries
thread = open_libraries()
if thread is not None:
    thread.join()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtorch_cpu" in line}
    import torch
    after = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtorch_cpu" in line}
    assert len(mapped) == 1 and mapped == after
    assert torch.ones(3).sum() == 3
"""
    assert failure(program) == ""


def test_an_engine_imports_its_extension_modules_before_torchs_library_is_opened() -> None:
    program = """
import sys
import quire.serving.process.engine_main
from quire.runtime.torch_import import import_extensions
import_extensions()
before = set(sys.modules)
import quire.serving.process.engine_process
later = [name for name in sys.modules if name not in before]
assert len(later) > 50
endings = (".so", ".pyd")
waiting = [name for name in later if (getattr(sys.modules[name], "__file__", None) or "").endswith(endings)]
assert not waiting, f"name what imports {waiting} in torch_import.import_extensions"
"""
    assert failure(program) == ""


def test_code_whose_pages_were_released_still_runs() -> None:
    program = """
from pathlib import Path
import torch
from quire.runtime.torch_import import forget_library_pages

def resident():
    lines, found, is_code = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in lines:
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            is_code = "libtorch_" in line and "r-xp" in line
        elif is_code and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found

x = torch.randn(64, 64)
wanted, before = torch.linalg.svdvals(x), resident()
forget_library_pages()
assert resident() < before / 2
assert torch.equal(torch.linalg.svdvals(x), wanted)
"""
    assert failure(program) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_without_proc_no_pages_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def refuse(path: Path) -> str:
        asked.append(path)
        raise PermissionError("no /proc here")

    monkeypatch.setattr(torch_import.Path, "read_text", refuse)
    torch_import.forget_library_pages()
    assert asked == [Path("/proc/self/maps")]
