"""The main program of an HTTP edge process: `python -m quire.serving.edge_main FD`, started by the supervisor."""

from __future__ import annotations

import gc
import sys

from quire.runtime.lazy_methods import lazy_methods


def main(arguments: list[str]) -> int:
    gc.disable()  # until the edge serves: imported objects stay, and scanning them again and again is slow
    with lazy_methods():
        from quire.serving.edge import run_edge
    return run_edge(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
