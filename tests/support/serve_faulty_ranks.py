"""`quire serve` whose ranks misbehave in steps of certain numbers (faulty_rank_main.py): `python -m serve_faulty_ranks
serve`. Its engine process is this program too."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from quire.config.server import ServerConfig
from quire.runtime.executor import make
from quire.serving.cli import main
from quire.serving.process import spawning, supervisor
from quire.serving.process.engine_process import load_engine, run_engine


class FaultySupervisor(supervisor.Supervisor):
    def __init__(self, config: ServerConfig, **options: Any) -> None:
        super().__init__(config, programs=supervisor.Programs(engine="serve_faulty_ranks"), **options)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        supervisor.Supervisor = FaultySupervisor  # type: ignore[misc]
        spawning.ENGINE = "serve_faulty_ranks"
        sys.exit(main())
    make.ProcessLauncher = partial(make.ProcessLauncher, module="faulty_rank_main")  # type: ignore[misc, assignment]
    sys.exit(run_engine(sys.argv[1:], load_engine))
