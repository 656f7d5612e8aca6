"""Kernel tests without results: each kernel that a test launches is compiled for an H200, and none runs.

Triton's interpreter runs Python, so it accepts what the compiler refuses: types that do not match, a shape that is no
power of two, an operation that the target does not have. `make compile-kernels` finds these without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

COMPILE_ONLY = os.environ.get("QUIRE_TEST_COMPILE") == "1"


class Compilations:
    """Replaces launches by compilations, counts them and keeps the first error of a test, and what the kernel that was
    compiled last under a name needs."""

    def __init__(self) -> None:
        self.launches = 0
        self.error: Exception | None = None
        self.needs: dict[str, Any] = {}  # Triton's metadata by kernel

    def install(self) -> None:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from h200 import H200

        driver.set_active(H200())
        JITFunction.run = self._compile_instead(JITFunction.run)

    def _compile_instead(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def compile_kernel(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            self.launches += 1
            try:
                compiled = run(kernel, *arguments, grid=grid, warmup=True, **named)
                self.needs[kernel.fn.__name__] = compiled.metadata
                return compiled
            except Exception as error:
                error.add_note(f"while {kernel.fn.__name__} was compiled for an H200")
                self.error = self.error or error
                raise

        return compile_kernel

    def begin_test(self) -> None:
        self.launches, self.error = 0, None
        self.needs.clear()

    def expect(self, is_met: bool, what: str) -> None:
        """Fail the test unless the condition is met. Assertions cannot: others compare what no kernel has written."""
        if not is_met:
            self.error = self.error or AssertionError(what)


compilations = Compilations()
