"""`quire serve` with real edges and the fake engine, which some prompts crash: `python -m serve_fake_engine serve`."""

from __future__ import annotations

import sys
from typing import Any

from quire.config.server import ServerConfig
from quire.serving.cli import main
from quire.serving.process import spawning, supervisor


class FakeEngineSupervisor(supervisor.Supervisor):
    def __init__(self, config: ServerConfig, **options: Any) -> None:
        super().__init__(config, programs=supervisor.Programs(engine="fake_engine_main"), **options)


if __name__ == "__main__":
    supervisor.Supervisor = FakeEngineSupervisor  # type: ignore[misc]
    spawning.ENGINE = "fake_engine_main"
    sys.exit(main())
