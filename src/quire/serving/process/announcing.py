"""What `quire serve` prints on the terminal: loading progress, and the address when it is ready."""

from __future__ import annotations

import sys
from typing import TextIO

from quire.serving.terminal import LoadingProgress


class Announcer:
    """Prints progress bars on a terminal, or one plain line per phase elsewhere, and then the ready line."""

    def __init__(self, *, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._bars = LoadingProgress(shown=True) if self._err.isatty() else None
        self._phase = ""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a phase, in its own units. This is the progress callback of loaders."""
        if self._bars is not None:
            self._bars(what, done, total)
        elif what != self._phase:
            print(f"{what} ...", file=self._err, flush=True)
        self._phase = what

    def end_progress(self) -> None:
        if self._bars is not None:
            self._bars.close()
        self._phase = ""

    def ready(self, name: str, url: str, seconds: float, playground: str | None, key_file: str | None = None) -> None:
        """Print that the server is ready. `playground` is an address that contains an admin key."""
        self.end_progress()
        print(f"Quire serves {name} on {url} (ready in {seconds:.1f} s)", file=self._out, flush=True)
        if playground is not None:
            print(f"Playground with the live block map: {playground}", file=self._out, flush=True)
        if key_file is not None:
            print(f"The admin key is in {key_file}", file=self._out, flush=True)
