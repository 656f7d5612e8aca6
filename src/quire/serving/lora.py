"""The LoRA adapters of requests to `LLM` and `AsyncLLM`, and checks of the folders that clients of a server name."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.serving.client import EngineClient
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.request import Submit

_MAX_PATH = 4_096


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request: its name, and the folder from which it is loaded on first use.

    `lora_int_id` has no effect: adapters are identified by name. With `load_inplace`, the folder is read again and
    replaces the adapter of this name; without a path, the folder is the one it was loaded from.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | os.PathLike[str] = ""
    load_inplace: bool = False

    @property
    def folder(self) -> str:
        """The absolute path of its folder; empty: the adapter must be loaded already."""
        return str(Path(self.lora_path).absolute()) if self.lora_path else ""


def take_loras(others: Mapping[str, object], num_prompts: int) -> tuple[list[LoRARequest | None], dict[str, object]]:
    """Return the adapter of each prompt, and the remaining arguments of a call. Raises InvalidRequest."""
    left: dict[str, Any] = dict(others)
    given = left.pop("lora_request", None)
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_prompts, left
    if not isinstance(given, list | tuple) or not all(each is None or isinstance(each, LoRARequest) for each in given):
        reason = f"must be a LoRARequest, got {type(given).__name__}"
        raise InvalidRequest("lora_request", reason, "pass one, or a list with one or None for each prompt")
    if len(given) != num_prompts:
        reason = f"has {len(given)} entries for {num_prompts} prompts"
        raise InvalidRequest("lora_request", reason, "pass one, or one per prompt")
    return list(given), left


def folder_to_load(client: EngineClient, request: LoRARequest) -> str | None:
    """Return the folder from which the adapter of a request must be loaded, or None if it is loaded. Raises
    InvalidRequest if it has no folder or the loaded one came from another folder."""
    found = next((info for info in client.adapters() if info.name == request.lora_name), None)
    if found is None and not request.folder:
        reason = f"{request.lora_name!r} is not loaded, and no lora_path is given"
        raise InvalidRequest("lora_request", reason, "give lora_path, or name it in lora_modules")
    if found is None or request.load_inplace:
        return request.folder or (found.folder if found is not None else None)
    if request.folder and request.folder != found.folder:
        reason = f"{request.lora_name!r} is loaded from {found.folder!r}, and lora_path is another folder"
        raise InvalidRequest("lora_request", reason, "choose another name, or set load_inplace=True")
    return None


def load_loras(client: EngineClient, requests: list[LoRARequest | None]) -> list[str]:
    """Load the adapters that are not loaded yet. Returns the adapter name of each request; "": none. Raises
    InvalidRequest."""
    for request in dict.fromkeys(requests):
        if request is not None and not isinstance(request, LoRARequest):
            raise InvalidRequest("lora_request", f"must be a LoRARequest, got {type(request).__name__}")
        folder = None if request is None else folder_to_load(client, request)
        if request is not None and folder is not None:
            try:
                client.load_adapter(request.lora_name, folder, in_place=request.load_inplace)
            except InvalidRequest as error:
                raise InvalidRequest(error.field, f"{folder}: {error.reason}", error.fix) from None
    return ["" if request is None else request.lora_name for request in requests]


def with_lora(client: EngineClient, requests: Sequence[Submit], lora: LoRARequest | None) -> Sequence[Submit]:
    """Return the requests with the given adapter, which is loaded first if necessary. With None, return them
    unchanged."""
    if lora is None:
        return requests
    (name,) = load_loras(client, [lora])
    return [replace(request, adapter=name) for request in requests]


@dataclass(frozen=True, slots=True)
class _Load:
    """An adapter that is being read. `over` is done when requests may name the adapter, or has the error."""

    folder: str
    over: Future[None]


class LoRALoader:
    """Loads adapters for coroutines of any event loop, each on its own thread while the engine continues to step. A
    load continues if the coroutine that started it is cancelled. Later requests for the same adapter wait for it.

    `call` runs a function on the engine's thread.
    """

    def __init__(self, client: EngineClient, call: Callable[[Callable[[], Any]], Future[Any]]) -> None:
        self._client, self._call = client, call
        self._loads: dict[str, _Load] = {}  # by name; only the engine's thread reads and writes it

    async def load(self, request: LoRARequest) -> str:
        """Load the adapter of a request if it is not loaded yet, and return its name. Raises InvalidRequest."""
        while True:
            begun = await asyncio.wrap_future(self._call(lambda: self._begin(request)))
            if begun is None:
                return request.lora_name
            load, is_own = begun
            try:
                await asyncio.wrap_future(load.over)
            except InvalidRequest:
                if is_own or load.folder == request.folder:
                    raise
            if is_own:
                return request.lora_name

    def _begin(self, request: LoRARequest) -> tuple[_Load, bool] | None:
        """Start to load the adapter of a request. Returns the load, or the running load of the same name, and whether
        this request started it. Returns None if the adapter is loaded. Called on the engine's thread."""
        name = request.lora_name
        if name in self._loads:
            return self._loads[name], False
        folder = folder_to_load(self._client, request)
        if folder is None:
            return None
        self._client.begin_load(name, in_place=request.load_inplace)
        load = self._loads[name] = _Load(folder, Future())
        load.over.set_running_or_notify_cancel()  # now a waiting coroutine cannot cancel it
        threading.Thread(target=self._read, args=(name, load), name="quire-adapter", daemon=True).start()
        return load, True

    def _read(self, name: str, load: _Load) -> None:
        info: AdapterInfo | None = None
        failure: Exception | None = None

        def finish() -> None:
            del self._loads[name]
            self._client.finish_load(name, info)

        try:
            info = self._client.read_adapter(name, load.folder)
        except Exception as error:  # noqa: BLE001 - raised in the coroutines that wait for it
            failure = error
        try:
            self._call(finish).result()
        except Exception as error:  # noqa: BLE001 - the engine has ended
            failure = failure or error
        if failure is not None:
            load.over.set_exception(failure)
        else:
            load.over.set_result(None)


def folder_below(root: str, path: str) -> str:
    """Return the absolute path of a folder that a client names. It must be below `root`. Raises InvalidRequest.

    `root` is a real path, and `path` may be relative to it. No part of the path may be `..`, a link or anything but a
    folder. The folder may hold only plain files and folders. So an adapter is read only from files that the operator
    put there.
    """
    if not path or len(path) > _MAX_PATH or not _is_text(path):
        raise InvalidRequest("lora_path", "is not the path of a folder", "name a folder below the operator's lora_dir")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/"):
        own = [part for part in root.split("/") if part]
        if parts[: len(own)] != own:
            raise _outside()
        parts = parts[len(own) :]
    if not parts or ".." in parts:
        raise _outside()
    fd = _open_root(root)
    try:
        for part in parts:
            fd, above = _open_folder(fd, part), fd
            os.close(above)
        _check_entries(fd)
    finally:
        os.close(fd)
    return str(Path(root, *parts))


def _is_text(path: str) -> bool:
    """Whether a path can be encoded as UTF-8 and has no NUL character."""
    try:
        return b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False


def _open_root(root: str) -> int:
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        reason = f"the operator's lora_dir cannot be opened: {error.strerror}"
        raise InvalidRequest("lora_path", reason, "have the operator put the folder back, then try again") from None


def _outside() -> InvalidRequest:
    reason = "is outside of the folder that adapters may be loaded from"
    return InvalidRequest("lora_path", reason, "name a folder below the operator's lora_dir, without `..`")


def _open_folder(above: int, part: str) -> int:
    """Open a subfolder by its name and return its file descriptor. Raises InvalidRequest if it is a link or not a
    folder."""
    try:
        status = os.stat(part, dir_fd=above, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise InvalidRequest("lora_path", f"{part!r:.80} is a link", "name the folder itself")
        return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        reason = f"{part!r:.80} cannot be opened as a folder: {error.strerror}"
        raise InvalidRequest("lora_path", reason, "name a folder that is there") from None


def _check_entries(folder: int) -> None:
    """Raise InvalidRequest if a folder holds links or special files."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "a special file"
                raise InvalidRequest("lora_path", f"holds {entry.name!r:.80}, {kind}", "put plain files there")
