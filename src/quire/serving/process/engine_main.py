"""The main program of the engine process: `python -m quire.serving.process.engine_main FD`, started by `quire serve` or
by its supervisor.

This module imports nothing slow at the top, so that loading torch's libraries begins early.
"""

from __future__ import annotations

import gc
import sys

from quire.runtime.lazy_methods import lazy_methods
from quire.runtime.torch_import import defer_modules, import_extensions, open_libraries
from quire.serving.process.spawning import die_with_parent


def main(arguments: list[str]) -> int:
    gc.disable()  # while loading: imported objects stay, and scanning them again and again is slow
    die_with_parent()  # before the imports, which take seconds
    import_extensions()
    open_libraries()
    defer_modules()
    with lazy_methods():
        from quire.serving.process.engine_process import import_ahead, load_engine, run_engine

    return run_engine(arguments, load_engine, import_ahead)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
