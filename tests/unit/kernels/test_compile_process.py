"""Child processes that compile kernels: what is left of one that was ended."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from quire.kernels.triton.compile_process import CompileProcess


def test_a_closed_child_leaves_no_pipe_and_compiles_nothing() -> None:
    child = CompileProcess()
    child.close()
    child.close()
    assert [pipe.closed for pipe in (child._child.stdin, child._child.stdout) if pipe is not None] == [True, True]
    assert child._child.returncode is not None
    assert not child.wait_ready()
    assert not child.compile("{}")
