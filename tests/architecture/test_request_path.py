"""Whoever follows one request through the source opens few files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from quire import LLM, QuireError, SamplingParams
from quire.kernels.native.loader import Unavailable, open_library
from tests.architecture.source import SOURCE

MOST_FILES = 70  # never raise it


class FileProfile:
    """Collects the files of this package whose functions are called while `is_on`, in this thread and in all threads
    that are started after `install`."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            self.files.add(frame.f_code.co_filename)


def why_not_compiled() -> str:
    """Why torch computes in place of the compiled kernels, through more files; "" if they are in use."""
    try:
        open_library()
    except Unavailable as reason:
        return str(reason)
    return ""


@pytest.fixture
def profile() -> Iterator[FileProfile]:
    profile = FileProfile()
    yield profile
    profile.remove()


def test_one_offline_chat_request_runs_through_few_files(profile: FileProfile) -> None:
    profile.install()  # before the model is loaded: its threads belong to the request's path
    try:
        llm = LLM(device="cpu")
    except QuireError as error:
        pytest.skip(f"the default model is not here: {error}")
    with llm:
        profile.is_on = True
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4, temperature=0))
        profile.is_on = False
    assert len(answer.outputs[0].token_ids) == 4
    package = str(SOURCE / "quire") + "/"
    path = sorted(name.removeprefix(package) for name in profile.files if name.startswith(package))
    assert {"serving/llm.py", "engine/core.py", "runtime/worker/worker.py"} <= set(path)
    assert len(path) <= MOST_FILES, "\n".join([*path, why_not_compiled()])
