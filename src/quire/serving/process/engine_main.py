"""`python -m quire.serving.process.engine_main FD`, started by the supervisor or before it: the engine process.

Nothing is imported above `main` that takes long, so that torch's libraries are opened from the first moment on."""

from __future__ import annotations

import gc
import sys

from quire.runtime.torch_import import defer_meta_kernels, open_libraries
from quire.serving.process.spawning import die_with_parent


def main(arguments: list[str]) -> int:
    gc.disable()  # until the engine is loaded: what is imported stays, and looking at it again and again takes long
    open_libraries()
    die_with_parent()  # also while it imports, which takes seconds
    defer_meta_kernels()
    from quire.serving.process.engine_process import import_ahead, load_engine, run_engine

    return run_engine(arguments, load_engine, import_ahead)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
