"""Builds the CPU kernels with each of the compiler's sanitizers and runs tests by them. An access out of bounds, or
undefined behaviour, ends the run with the line. The package and its libraries are put in `build`, apart from those in
use.

    python tools/sanitize.py [--path portable] [test ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from quire.kernels.native.loader import choose_path
from quire.kernels.native.paths import PATHS, CpuPath

ROOT = Path(__file__).parents[1]
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so"}  # GCC's
TESTS = [
    *(
        f"tests/unit/kernels/native/test_{name}.py"
        for name in ("panels", "int8_panels", "low_rank", "delta", "program")
    ),
    *(
        f"tests/unit/runtime/{name}.py"
        for name in ("loading/test_quantized", "layers/test_experts", "sampling/test_native_choice")
    ),
    "tests/unit/runtime/attention",
    *(f"tests/engine/test_{name}.py" for name in ("quantized", "groups", "fp8")),
]
OPEN = """
from quire.kernels.native import loader
from quire.runtime.hardware import use_cpu_path
use_cpu_path()
loader.open_library()
print(loader.__file__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths = {path.name: path for path in PATHS}
    parser.add_argument(
        "--path", choices=paths, default=choose_path().name, help="of the kernels; default: that in use"
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders of tests")
    given = parser.parse_args()
    path = paths[given.path]
    for sanitizer in RUNTIMES:
        folder = ROOT / "build" / sanitizer
        print(f"{sanitizer}: building {path.name} in {folder.relative_to(ROOT)}", flush=True)
        build(sanitizer, path, folder)
        environment = environment_of(sanitizer, path, folder)
        # without kernels most tests would be skipped
        opened = subprocess.check_output([sys.executable, "-c", OPEN], env=environment, cwd=ROOT, text=True)
        if not Path(opened.strip()).is_relative_to(folder):
            sys.exit(f"the kernels were loaded from {opened.strip()}, not from {folder}")
        pytest = ["-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-o", "pythonpath=. tests/support"]
        subprocess.run([sys.executable, *pytest, *given.tests], env=environment, cwd=ROOT, check=True)


def build(sanitizer: str, path: CpuPath, folder: Path) -> None:
    shutil.copytree(
        ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    )
    command = ["setup.py", "-q", "build_ext", "--sanitize", sanitizer, "--paths", path.library]
    folders = ["--build-lib", str(folder), "--build-temp", str(folder.with_name(f"{sanitizer}-objects"))]
    subprocess.run([sys.executable, *command, *folders], cwd=ROOT, check=True)


def environment_of(sanitizer: str, path: CpuPath, folder: Path) -> dict[str, str]:
    runtime = subprocess.check_output(["gcc", f"-print-file-name={RUNTIMES[sanitizer]}"], text=True).strip()
    return {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "QUIRE_CPU_PATH": path.name,
    }


if __name__ == "__main__":
    main()
