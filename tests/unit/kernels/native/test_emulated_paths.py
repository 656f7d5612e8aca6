"""The kernels of instruction sets that this machine does not have, in an emulator: where there is a compiler for the
other kind of CPU and qemu's user mode (Debian: g++-x86-64-linux-gnu or g++-aarch64-linux-gnu, and qemu-user)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.kernels.native.paths import COMPILE, CpuPath, paths_of

ROOT = Path(__file__).parents[4]
CHECKS, SOURCES = ROOT / "tests/support/path_checks.cpp", ROOT / "src/quire/kernels/native"
PATHS = [  # those that qemu emulates; it knows no AVX-512 and no tile units
    (machine, path)
    for machine, names in (("x86_64", ("avx2", "portable")), ("aarch64", ("i8mm", "dotprod", "portable")))
    for path in paths_of(machine)
    if path.name in names
]
TOKENS = "7b15804d1842c971"  # a digest of the tokens that every path chooses


@pytest.mark.parametrize(("machine", "path"), PATHS, ids=[f"{machine}-{path.name}" for machine, path in PATHS])
def test_a_path_computes_in_an_emulator_what_it_should(machine: str, path: CpuPath, tmp_path: Path) -> None:
    if machine == platform.machine() and path.name != "i8mm":
        pytest.skip("test_paths.py runs it as it is")
    own = machine == platform.machine()
    compiler, emulator = "g++" if own else f"{machine}-linux-gnu-g++", f"qemu-{machine}"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        pytest.skip(f"needs {compiler} and {emulator}")
    program = tmp_path / "checks"
    flags = [*COMPILE, *path.flags, "-O1", '-DQUIRE_SOURCE="none"', f"-I{SOURCES}"]  # -O3 compiles for minutes
    subprocess.run([compiler, *flags, str(CHECKS), "-o", str(program)], check=True, timeout=900)
    library = [] if own else ["-L", f"/usr/{machine}-linux-gnu"]
    done = subprocess.run(
        [emulator, "-cpu", "max", *library, str(program)], capture_output=True, text=True, timeout=900, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [TOKENS, TOKENS]), done.stdout + done.stderr


@pytest.mark.parametrize("flags", [["-march=armv8.2-a+bf16"], ["-DPLAIN_DOTS"]], ids=["arm", "plain"])
def test_dot_products_of_bfloat16_give_the_sums_of_their_numbers(flags: list[str], tmp_path: Path) -> None:
    own, program = platform.machine() == "aarch64" or "-DPLAIN_DOTS" in flags, tmp_path / "checks"
    compiler = "g++" if own else "aarch64-linux-gnu-g++"
    emulator = ["qemu-aarch64", "-cpu", "max"] if "-DPLAIN_DOTS" not in flags else []
    if missing := [tool for tool in (compiler, *emulator[:1]) if shutil.which(tool) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    portable = paths_of(platform.machine())[-1].flags if own else ()
    given = [*COMPILE, *portable, *flags, "-O1", f"-I{SOURCES}"]
    subprocess.run([compiler, *given, str(CHECKS.with_name("bf16_dots_checks.cpp")), "-o", str(program)], check=True)
    library = [] if own else ["-L", "/usr/aarch64-linux-gnu"]
    done = subprocess.run([*emulator, *library, str(program)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_integer_products_by_tile_units_have_the_bits_of_those_without(tmp_path: Path) -> None:
    """The tile units in plain code, on a CPU with AVX-512."""
    wide = next((path for path in paths_of(platform.machine()) if path.name == "avx512"), None)
    if wide is None or "avx512vl" not in Path("/proc/cpuinfo").read_text() or shutil.which("g++") is None:
        pytest.skip("needs AVX-512 and g++")
    program = tmp_path / "checks"
    given = [*COMPILE, *wide.flags, "-O1", f"-I{SOURCES}", str(CHECKS.with_name("tile_checks.cpp")), "-o", str(program)]
    subprocess.run(["g++", *given], check=True, timeout=900)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
