from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interpreter import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
DRILL = Path(__file__).parents[3] / "support/compile_drill.py"


def libcuda(folder: Path) -> Path:
    """A library with the functions that launchers are linked against. Nothing calls them."""
    source = folder / "libcuda.c"
    names = ["LaunchKernelEx", "GetErrorString", "PointerGetAttribute", "FuncSetAttribute"]
    names += ["CtxGetCurrent", "CtxSetCurrent", "DeviceGet", "DevicePrimaryCtxRetain"]
    source.write_text("".join(f"int cu{name}(void) {{ return 0; }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the drill saw, with an empty compilation cache."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    variables["TRITON_LIBCUDA_PATH"] = variables["LD_LIBRARY_PATH"] = str(libcuda(tmp_path_factory.mktemp("libcuda")))
    done = subprocess.run(
        [sys.executable, str(DRILL)], env=variables, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_each_kernel_of_a_step_is_compiled_and_none_launched(drill: dict[str, Any]) -> None:
    assert drill["ahead"] == 2
    assert [only for is_main, only in drill["asked"] if is_main] == [True] * 9


def test_a_step_compiled_ahead_compiles_nothing_when_it_comes(drill: dict[str, Any]) -> None:
    assert drill["again"] == 0


def test_kernels_that_nobody_waits_for_are_compiled_by_child_processes(drill: dict[str, Any]) -> None:
    """This process only reads them from Triton's cache: what a child compiles is what a launch looks for, in Gluon
    too."""
    kernels = ["_gate_kernel", *["_hopper_prefill"] * 3, "_rms_norm_kernel"]
    assert sorted(drill["later"]) == [[kernel, True] for kernel in kernels]


def test_other_threads_launch_as_ever(drill: dict[str, Any]) -> None:
    assert [only for is_main, only in drill["asked"] if not is_main] == [False] * 2


def test_launches_are_as_before_afterwards(drill: dict[str, Any]) -> None:
    assert drill["restored"]


def test_a_launch_waits_for_a_compilation_that_has_begun_and_begins_no_second_one(drill: dict[str, Any]) -> None:
    assert [name for name, _ in drill["joined"]] == ["_rms_norm_kernel"] * 3  # of four launches of three variants


def test_child_processes_build_the_launchers_of_their_kernels(drill: dict[str, Any]) -> None:
    assert drill["launchers"] == drill["variants"] >= 3
