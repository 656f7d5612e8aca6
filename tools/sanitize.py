"""Runs the CPU kernels and the router's compiled code under GCC's sanitizers. An access out of bounds, undefined
behaviour or a data race ends the run and prints the source line.

- address, undefined: the compiled code is built with each sanitizer, and its tests and those of engines run with it.
  The package and its libraries are built in `build`, separate from those in use.
- all three, including thread: C++ programs check the threads of the kernels and the memory that processes share; under
  the thread sanitizer also gemms and sampling by several threads. (Python itself cannot run under the thread sanitizer,
  because torch's threads are not compiled for it.)

    python tools/sanitize.py [--path portable] [--only thread] [test ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from quire.kernels.native.loader import choose_path
from quire.kernels.native.paths import COMPILE, PATHS, CpuPath

ROOT = Path(__file__).parents[1]
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so"}  # GCC's, preloaded for Python
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # leaks of the interpreter itself
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",
}
SMALL_CHECKS = ("team_checks", "shared_memory_checks")
# Programs of the portable path whose instructions are emulated in plain code, see PLAIN_DOTS.
PLAIN_CHECKS = ("bf16_dots_checks",)
MEMORY_CHECKS = (*SMALL_CHECKS, *PLAIN_CHECKS, "router_checks")
CHECKS = {"address": MEMORY_CHECKS, "undefined": MEMORY_CHECKS, "thread": (*SMALL_CHECKS, "path_checks")}
DEFINES = ('-DQUIRE_SOURCE="none"', "-DPLAIN_DOTS")  # bfloat16 dot products as plain code, which runs on any CPU
KERNELS = "panels int8_panels super_blocks tiles low_rank delta mamba selective program team message_ring"
TESTS = [
    *(f"tests/unit/kernels/native/test_{name}.py" for name in KERNELS.split()),
    *(
        f"tests/unit/runtime/{name}.py"
        for name in (
            "loading/test_quantized",
            "layers/test_experts",
            "layers/test_integer_gemm",
            "sampling/test_native_choice",
            "sampling/test_logprobs",
            "worker/test_head_choice",
            "parallel/test_shared_group",
        )
    ),
    "tests/unit/runtime/attention",
    "tests/unit/serving/router/test_native.py",
    "tests/unit/serving/router/test_prefix_tree.py",
    "tests/unit/serving/router/test_prompt_keys.py",
    *(f"tests/engine/test_{name}.py" for name in ("quantized", "groups", "fp8")),
]
OPEN = """
from quire.kernels.native import loader
from quire.runtime.hardware import use_cpu_path
from quire.serving.router import native
use_cpu_path()
loader.open_library()
native.open_library()
print(loader.__file__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths = {path.name: path for path in PATHS}
    parser.add_argument(
        "--path", choices=paths, default=choose_path().name, help="of the kernels; default: that in use"
    )
    parser.add_argument("--only", choices=CHECKS, help="this sanitizer alone")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders of tests")
    given = parser.parse_args()
    path = paths[given.path]
    for sanitizer in [given.only] if given.only else CHECKS:
        for name in CHECKS[sanitizer]:
            check(sanitizer, path, name)
        if sanitizer in RUNTIMES:
            test(sanitizer, path, given.tests)


def check(sanitizer: str, path: CpuPath, name: str) -> None:
    """Compile a program of checks with a sanitizer, and run it."""
    program = ROOT / "build" / f"{sanitizer}-{name}"
    program.parent.mkdir(exist_ok=True)
    print(f"{sanitizer}: {name}", flush=True)
    own = PATHS[-1].flags if name in PLAIN_CHECKS else path.flags
    flags = [*COMPILE, *own, "-O1", "-g1", f"-fsanitize={sanitizer}", *DEFINES]
    source = ROOT / "tests" / "support" / f"{name}.cpp"
    package = ROOT / "src" / "quire"
    folders = [f"-I{folder}" for folder in (package / "kernels" / "native", package)]
    subprocess.run(["g++", *flags, *folders, str(source), "-o", str(program)], check=True)
    subprocess.run([str(program)], env={**os.environ, **OPTIONS}, check=True)


def test(sanitizer: str, path: CpuPath, tests: list[str]) -> None:
    """Build the compiled code with a sanitizer, and run tests with it."""
    folder = ROOT / "build" / sanitizer
    print(f"{sanitizer}: building {path.name} in {folder.relative_to(ROOT)}", flush=True)
    build(sanitizer, path, folder)
    environment = environment_of(sanitizer, path, folder)
    # without kernels most tests would be skipped
    opened = subprocess.check_output([sys.executable, "-c", OPEN], env=environment, cwd=ROOT, text=True)
    if not Path(opened.strip()).is_relative_to(folder):
        sys.exit(f"the kernels were loaded from {opened.strip()}, not from {folder}")
    pytest = ["-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-o", "pythonpath=. tests/support"]
    subprocess.run([sys.executable, *pytest, *tests], env=environment, cwd=ROOT, check=True)


def build(sanitizer: str, path: CpuPath, folder: Path) -> None:
    shutil.copytree(
        ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    )
    command = ["setup.py", "-q", "build_ext", "--sanitize", sanitizer, "--paths", path.library]
    folders = ["--build-lib", str(folder), "--build-temp", str(folder.with_name(f"{sanitizer}-objects"))]
    subprocess.run([sys.executable, *command, *folders], cwd=ROOT, check=True)


def environment_of(sanitizer: str, path: CpuPath, folder: Path) -> dict[str, str]:
    # with C++'s own: the runtime looks for what throws exceptions when it is loaded, and Python itself has none of it
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in (RUNTIMES[sanitizer], "libstdc++.so.6")
    ]
    return {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "QUIRE_CPU_PATH": path.name,
    }


if __name__ == "__main__":
    main()
