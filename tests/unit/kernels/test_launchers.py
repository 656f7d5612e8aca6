"""Triton's launchers, each a library in C: the one that a kernel gets is its own, whatever is loaded meanwhile."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from triton.runtime.build import compile_module_from_src

import quire.kernels.triton.compiling  # noqa: F401  (whatever loads kernels has imported it)

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler")
SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef Methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef Definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, Methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&Definition); }
"""  # as Triton's own are made


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def load(number: int) -> ModuleType:
    loaded: ModuleType = compile_module_from_src(src=SOURCE % number, name="__triton_launcher")
    return loaded


def test_a_launcher_that_is_loaded_again_replaces_no_other() -> None:
    loaded = [load(number) for number in (1, 2, 1, 2, 1)]
    assert [module.launch() for module in loaded] == [1, 2, 1, 2, 1]


def test_threads_that_load_launchers_at_once_get_their_own() -> None:
    loaded = {number: [load(number)] for number in range(4)}

    def work(number: int) -> None:
        loaded[number] += [load(number) for _ in range(19)]

    threads = [threading.Thread(target=work, args=(number,)) for number in loaded]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, modules in loaded.items():
        assert [module.launch() for module in modules] == [number] * 20
