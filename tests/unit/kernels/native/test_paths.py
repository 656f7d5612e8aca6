"""The paths of the compiled CPU kernels: which one is chosen, that each computes what the others do, and that each
holds no instruction that its CPUs lack."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quire.kernels.native import loader
from quire.kernels.native.loader import LacksPath, Unavailable, choose_path, find_unbuilt_path, why_not_native
from quire.kernels.native.paths import PATHS, CpuPath, paths_of

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
KERNELS = (
    "panels", "int8_panels", "shared_factors", "super_blocks", "tiles", "low_rank", "delta", "mamba", "selective",
    "program", "attention",
)  # fmt: skip
TESTS = [f"test_{name}.py" for name in KERNELS]
# registers that no baseline CPU has, and instructions of one path that the path below must not have
ABOVE = {
    "x86_64": {
        "portable": r"%[yz]mm|\bv[a-z0-9]+ ",
        "avx2": r"%zmm|%k[1-7]",
        "avx512": r"\bvpdp|\bvdpbf16|\bvcvtne|\btd?p?load|\btdp",
        "avx512_vnni": r"\bvdpbf16|\bvcvtne2?ps2?pbf16|\btileload|\btdp",
    },
    "aarch64": {
        "portable": r"\b[su]dot\b|\bcas|\bldadd|mmla|\bbf(dot|mla|cvt)",
        "dotprod": r"mmla|\bbf(dot|mla|cvt)",
    },
}


def paths_here() -> list[CpuPath]:
    return [path for path in PATHS if path.needs <= loader._cpu_features()]


def skip_unbuilt(path: CpuPath) -> None:
    if not loader._is_built(path):
        pytest.skip(f"{path.name} was not built: python setup.py build_ext --inplace --paths all")


def run_python(code: list[str], path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "QUIRE_CPU_PATH": path, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *code], env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
    )


@pytest.mark.parametrize("path", paths_here() if REFUSAL is None else [], ids=lambda path: path.name)
def test_every_path_that_runs_here_passes_the_tests_of_the_kernels(path: CpuPath) -> None:
    skip_unbuilt(path)
    if os.environ.get("QUIRE_CPU_PATH"):
        pytest.skip("runs in each of the processes that this test starts")
    if path == choose_path():
        pytest.skip("make test runs them by this path")
    files = [*(str(HERE / name) for name in TESTS), str(ROOT / "tests/unit/runtime/sampling/test_native_choice.py")]
    result = run_python(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files], path.name)
    assert result.returncode == 0, result.stdout[-3000:]


def test_the_best_path_of_this_cpu_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.environ.get("QUIRE_CPU_PATH"):
        assert choose_path() == next(path for path in paths_here() if loader._is_built(path))
    monkeypatch.setattr(loader, "_cpu_features", frozenset)
    assert choose_path.__wrapped__().name in ("portable", os.environ.get("QUIRE_CPU_PATH"))


def test_the_best_path_of_this_cpu_is_named_where_it_was_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    features = loader._cpu_features()
    monkeypatch.setattr(loader, "_cpu_features", lambda: features)
    monkeypatch.setattr(loader, "_HERE", tmp_path)
    best = next(path for path in PATHS if path.needs <= features)
    assert find_unbuilt_path() == best
    loader._file_of(f"_cpu_{best.library}").touch()
    assert find_unbuilt_path() is None


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("", "portable"),
        ("avx2 fma f16c bmi1", "portable"),
        ("avx2 fma f16c bmi1 bmi2", "avx2"),
        ("avx2 fma f16c bmi1 bmi2 avx512f avx512cd avx512bw avx512dq avx512vl", "avx512"),
        ("avx2 fma f16c bmi1 bmi2 avx512f avx512cd avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", "avx512_bf16"),
    ],
)
def test_a_path_is_taken_only_with_all_that_it_needs(features: str, expected: str) -> None:
    has = frozenset(features.split())
    assert next(path.name for path in paths_of("x86_64") if path.needs <= has) == expected


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_the_last_path_needs_nothing_and_each_needs_no_less_than_those_behind_it(machine: str) -> None:
    paths = paths_of(machine)
    assert (paths[-1].name, paths[-1].needs) == ("portable", frozenset())
    assert all(above.needs > below.needs for above, below in pairwise(paths))
    assert not any("native" in flag for path in paths for flag in path.flags)


def test_a_path_that_the_cpu_lacks_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_cpu_features", frozenset)
    monkeypatch.setattr(loader._Choice, "asked", PATHS[0].name)
    if PATHS[0].needs:
        with pytest.raises(LacksPath, match=f"needs a CPU with .*{min(PATHS[0].needs)}.*run here: portable"):
            choose_path.__wrapped__()
    monkeypatch.setattr(loader._Choice, "asked", "pentium")
    with pytest.raises(LacksPath, match="unknown path 'pentium' .*: .*portable"):
        choose_path.__wrapped__()


def test_without_libraries_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "_HERE", tmp_path)
    monkeypatch.setattr(loader._Choice, "asked", None)
    with pytest.raises(Unavailable, match="were not built"):
        choose_path.__wrapped__()


def test_the_environment_names_the_path_and_a_wrong_name_is_an_error() -> None:
    code = "from quire.runtime.hardware import detect_hardware; print(detect_hardware().cpu_path)"
    assert run_python(["-c", code], "portable").stdout.strip() == "portable"
    wrong = run_python(["-c", code], "pentium")
    assert wrong.returncode != 0
    assert "QUIRE_CPU_PATH" in wrong.stderr
    assert "portable" in wrong.stderr


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("path", [path for path in PATHS if path.name in ABOVE.get(os.uname().machine, {})])
def test_a_library_holds_no_instruction_that_its_cpus_lack(path: CpuPath) -> None:
    skip_unbuilt(path)
    file = loader._file_of(f"_cpu_{path.library}")
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", file], capture_output=True, text=True, check=True)
    above = re.compile(ABOVE[os.uname().machine][path.name])
    found = [line for line in text.stdout.splitlines() if "\t" in line and above.search(line.split("\t", 1)[1])]
    assert not found, found[:5]
