"""Which libraries setup.py builds, and when it builds those of the CPU kernels again. A script stands in for the
compiler of the kernels: what it makes holds the command line, and so the digest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quire.kernels.native import loader
from quire.kernels.native.paths import PATHS, digest_of_sources
from quire.serving.router import native

ROOT = Path(__file__).parents[3]
NATIVE, ROUTER = Path("src/quire/kernels/native"), Path("src/quire/serving/router")
COMPILER = shutil.which("c++")
STAND_IN = """#!{python}
import subprocess, sys
from pathlib import Path
words = sys.argv[1:]
small = ("cpu_features", "native.")
if "--version" in words or any(Path(word).name.startswith(small) for word in words):
    sys.exit(subprocess.call(["{compiler}", *words]))
made = Path(words[words.index("-o") + 1])
linked = [Path(word) for word in words if word.endswith(".o") and Path(word) != made]
made.write_text("".join(file.read_text() for file in linked) or " ".join(words))
if not linked:
    with open("compiled", "a") as log:
        print(made, file=log)
"""
ALL = {path.library for path in PATHS}
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class Checkout:
    """A copy of what setup.py needs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.native = folder, folder / NATIVE
        self.native.mkdir(parents=True)
        for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        (folder / ROUTER).mkdir(parents=True)
        for part in (NATIVE, ROUTER):
            for file in (ROOT / part).iterdir():
                if file.suffix in (".h", ".cpp", ".py"):
                    shutil.copy(file, folder / part)
        self._compiler = folder / "compiler"
        self._compiler.write_text(STAND_IN.format(python=sys.executable, compiler=COMPILER))
        self._compiler.chmod(0o755)

    def build(self, *arguments: str) -> set[str]:
        """Run setup.py. Returns the libraries that were compiled."""
        log = self.folder / "compiled"
        log.unlink(missing_ok=True)
        ended = subprocess.run(
            [sys.executable, "setup.py", "-q", *arguments],
            cwd=self.folder,
            env={**os.environ, "CXX": str(self._compiler), "CC": str(self._compiler)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return set(re.findall(r"\._cpu_(\w+)/", log.read_text() if log.exists() else ""))

    def libraries(self) -> set[str]:
        return {file.name.removeprefix("_cpu_").partition(".")[0] for file in self.native.glob("_cpu_*.so")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def test_a_checkout_gets_the_best_path_of_this_cpu_and_the_portable_one(checkout: Checkout) -> None:
    here = {next(path.library for path in PATHS if path.needs <= loader._cpu_features()), "portable"}
    assert checkout.build("build_ext", "--inplace") == checkout.libraries() == here
    assert checkout.build("build_ext", "--inplace", "--paths", "all") == ALL - here
    assert checkout.libraries() == ALL
    (library,) = (checkout.folder / ROUTER).glob("_native.*.so")
    assert native.digest_of_sources(checkout.folder / ROUTER).encode() in library.read_bytes()


def test_a_wheel_gets_every_path(checkout: Checkout) -> None:
    assert checkout.build("bdist_wheel") == ALL
    (wheel,) = (checkout.folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name).name for name in archive.namelist()]
    assert {name.removeprefix("_cpu_").partition(".")[0] for name in names if name.startswith("_cpu_")} == ALL
    assert any(name.startswith("_features.") for name in names)
    assert any(name.startswith("_native.") for name in names)
    assert {"native.cpp", "json_runs.h", "json_text.h", "prefix_tree.h"} < set(names)


def test_a_library_is_built_again_when_its_sources_or_flags_have_changed(checkout: Checkout) -> None:
    checkout.build("build_ext", "--inplace", "--paths", "all")
    assert checkout.build("build_ext", "--inplace", "--paths", "all") == set()
    assert checkout.build("build_ext", "--inplace", "--force", "--paths", "portable") == {"portable"}
    for name in ("paths.py", "simd.h"):
        before = digest_of_sources(checkout.native)
        with (checkout.native / name).open("a") as file:
            file.write("\n")
        assert digest_of_sources(checkout.native) != before
        assert checkout.build("build_ext", "--inplace", "--paths", "portable") == {"portable"}
        assert checkout.libraries() == {"portable"}  # the loader would refuse the others


def test_a_path_that_does_not_exist_is_refused(checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match="--paths: pentium is none of all, .*portable"):
        checkout.build("build_ext", "--inplace", "--paths", "portable,pentium")


@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_libraries_for_a_sanitizer_stay_out_of_the_checkout(checkout: Checkout, sanitizer: str) -> None:
    arguments = ("build_ext", "--sanitize", sanitizer, "--paths", "portable")
    assert checkout.build(*arguments, "--build-lib", "apart") == {"portable"}
    assert checkout.libraries() == set()
    (library,) = (checkout.folder / "apart").glob("quire/kernels/native/_cpu_portable.*")
    assert f"-fsanitize={sanitizer}" in library.read_text()
    (router,) = (checkout.folder / "apart").glob("quire/serving/router/_native.*.so")
    assert {"address": b"__asan_", "undefined": b"__ubsan_"}[sanitizer] in router.read_bytes()
    with pytest.raises(AssertionError, match="--sanitize: .* use --build-lib, not --inplace"):
        checkout.build(*arguments, "--inplace")


def test_a_sanitizer_that_is_not_known_is_refused(checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match="--sanitize: thread is none of address, undefined"):
        checkout.build("build_ext", "--sanitize", "thread")
