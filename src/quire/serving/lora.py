"""LoRA adapters as users name them: in calls of `LLM` and `AsyncLLM`, and by their folders."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.serving.client import EngineClient
from quire.types.errors import InvalidRequest
from quire.types.request import Submit

_MAX_PATH = 4_096


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request: its name, and the folder that it is loaded from when it is first used.

    `lora_int_id` has no effect: names tell adapters apart. With `load_inplace`, the folder is read again and replaces
    what had the name.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | os.PathLike[str] = ""
    load_inplace: bool = False

    @property
    def folder(self) -> str:
        """The absolute path of its folder; empty: it must be loaded already."""
        return str(Path(self.lora_path).absolute()) if self.lora_path else ""


def take_loras(others: Mapping[str, object], num_prompts: int) -> tuple[list[LoRARequest | None], dict[str, object]]:
    """Return the adapter of each prompt, and the other arguments of a call. Raises InvalidRequest."""
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


def must_load(client: EngineClient, request: LoRARequest) -> bool:
    """Whether the adapter of a request must be loaded first. Raises InvalidRequest if it cannot be."""
    found = next((info for info in client.adapters() if info.name == request.lora_name), None)
    if request.load_inplace or (found is None and request.folder):
        return True
    if found is None:
        reason = f"{request.lora_name!r} is not loaded, and no lora_path is given"
        raise InvalidRequest("lora_request", reason, "give lora_path, or name it in lora_modules")
    if request.folder and request.folder != found.folder:
        reason = f"{request.lora_name!r} is loaded from {found.folder!r}, and lora_path is another folder"
        raise InvalidRequest("lora_request", reason, "choose another name, or set load_inplace=True")
    return False


def load_loras(client: EngineClient, requests: list[LoRARequest | None]) -> list[str]:
    """Load the adapters that are not loaded yet. Returns the name of each request's adapter; "": none."""
    for request in dict.fromkeys(requests):
        if request is not None and must_load(client, request):
            client.load_adapter(request.lora_name, request.folder, in_place=request.load_inplace)
    return ["" if request is None else request.lora_name for request in requests]


def with_lora(client: EngineClient, requests: Sequence[Submit], lora: LoRARequest | None) -> Sequence[Submit]:
    """The requests under an adapter, which is loaded if it is not yet; None: as they are."""
    if lora is None:
        return requests
    (name,) = load_loras(client, [lora])
    return [replace(request, adapter=name) for request in requests]


async def load_lora(
    client: EngineClient, call: Callable[[Callable[[], Any]], Future[Any]], request: LoRARequest
) -> str:
    """Load the adapter of a request if it is not loaded yet, and return its name. `call` runs a function on the
    engine's thread, where steps go on while the adapter is read."""
    name = request.lora_name

    def begin() -> bool:
        is_missing = must_load(client, request)
        if is_missing:
            client.begin_load(name, in_place=request.load_inplace)
        return is_missing

    if await asyncio.wrap_future(call(begin)):
        info = None
        try:
            info = await asyncio.to_thread(client.read_adapter, name, request.folder)
        finally:
            await asyncio.wrap_future(call(lambda: client.finish_load(name, info)))
    return name


def folder_below(root: str, path: str) -> str:
    """Return the folder that a client names, which must be `root`'s own or below it. Raises InvalidRequest.

    `root` is a real path. The path may be relative to it. No part of it may be `..`, a link or anything but a folder,
    and the folder may hold only plain files: what an adapter is read from is what the operator put there.
    """
    if not path or len(path) > _MAX_PATH or "\0" in path:
        raise InvalidRequest("lora_path", "is no path of a folder", "name a folder below the operator's lora_dir")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/"):
        own = [part for part in root.split("/") if part]
        if parts[: len(own)] != own:
            raise _outside()
        parts = parts[len(own) :]
    if not parts or ".." in parts:
        raise _outside()
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            fd, above = _open_folder(fd, part), fd
            os.close(above)
        _check_entries(fd)
    finally:
        os.close(fd)
    return str(Path(root, *parts))


def _outside() -> InvalidRequest:
    reason = "is outside of the folder that adapters may be loaded from"
    return InvalidRequest("lora_path", reason, "name a folder below the operator's lora_dir, without `..`")


def _open_folder(above: int, part: str) -> int:
    """Open a folder in another one, by its name. Raises InvalidRequest if it is a link, or no folder."""
    try:
        status = os.stat(part, dir_fd=above, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise InvalidRequest("lora_path", f"{part!r:.80} is a link", "name the folder itself")
        return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        reason = f"{part!r:.80} cannot be opened as a folder: {error.strerror}"
        raise InvalidRequest("lora_path", reason, "name a folder that is there") from None


def _check_entries(folder: int) -> None:
    """Raise InvalidRequest for a folder that holds links or special files."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "a special file"
                raise InvalidRequest("lora_path", f"holds {entry.name!r:.80}, {kind}", "put plain files there")
