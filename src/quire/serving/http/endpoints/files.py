"""OpenAI's files: upload, list, read and delete. Batches read their requests from files and write results to files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Literal

from quire.serving.http.batches.file_store import StoredFile
from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.multipart import read_form
from quire.serving.http.schemas import FLAG, TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.serving.http.service import Service
from quire.types.errors import InvalidRequest

MAX_PAGE = 10_000
MAX_NAME_CHARACTERS = 255
PIECE_BYTES = 2**18  # bytes of a download that are read and sent at once
PURPOSES = ("batch", "user_data", "evals", "fine-tune", "assistants", "vision")


class Files:
    """The handlers of /v1/files. A file belongs to the API key that uploaded it; requests with other keys do not find
    it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def upload(self, exchange: Exchange) -> None:
        service = self._service
        with service.metered(is_upload=True) as meter:
            body = await exchange.read_form(service.limits, meter.add)
            content_type = exchange.headers[b"content-type"].decode("latin-1")
            parts = await service.in_thread_for(len(body), read_form, content_type, body)
            del body
            purpose = parts.get("purpose", ("", b""))[1][:64].decode("utf-8", "replace")
            if purpose not in PURPOSES:
                raise InvalidRequest("purpose", f"must be one of {', '.join(PURPOSES)}", "batch is the usual one")
            if "file" not in parts:
                raise InvalidRequest("file", "is missing", "send it as the part named file")
            name, data = parts["file"]
            name = re.sub(r"[\x00-\x1f\x7f/\\]", "_", name)[:MAX_NAME_CHARACTERS] or "file"
            store, owner = service.batches.files, exchange.principal
            file = await asyncio.to_thread(store.add, owner, name, purpose, data)
        await exchange.reply_json(file.as_json())

    async def listing(self, exchange: Exchange) -> None:
        files = await asyncio.to_thread(self._service.batches.files.owned_by, exchange.principal)
        purpose = exchange.query.get("purpose", [""])[-1]
        shown = [file.as_json() for file in files if not purpose or file.purpose == purpose]
        await exchange.reply_json(page(exchange, shown))

    async def get(self, exchange: Exchange) -> None:
        await exchange.reply_json((await self._file(exchange)).as_json())

    async def content(self, exchange: Exchange) -> None:
        """Send the file in pieces, as fast as the client reads."""
        file = await self._file(exchange)
        pieces = self._service.batches.files.pieces(file, PIECE_BYTES)
        headers = ((b"content-type", b"application/octet-stream"), (b"x-content-type-options", b"nosniff"))
        await exchange.reply_in_pieces(pieces, file.num_bytes, headers, self._service.limits["stall_seconds"])

    async def delete(self, exchange: Exchange) -> None:
        file = await self._file(exchange)
        await asyncio.to_thread(self._service.batches.files.delete, file)
        await exchange.reply_json({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, exchange: Exchange) -> StoredFile:
        file_id = str(exchange.scope["path_params"]["file_id"])
        return await asyncio.to_thread(self._service.batches.files.get, exchange.principal, file_id)


def page(exchange: Exchange, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a page of a list, by the query parameters `after`, `limit` and `order` (desc: newest first, the
    default)."""
    given = exchange.query
    limit, after, order = (given.get(name, [""])[-1] for name in ("limit", "after", "order"))
    if limit and (not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest("limit", f"must be in [1, {MAX_PAGE}]", "choose a value inside it")
    if order not in ("", "asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    if order == "asc":
        rows = rows[::-1]
    if after:
        places = [place for place, row in enumerate(rows) if row["id"] == after]
        rows = rows[places[0] + 1 :] if places else []
    shown = rows[: int(limit) if limit else MAX_PAGE]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": len(shown) < len(rows)}


def _route(
    name: str,
    path: str,
    summary: str,
    handler: Callable[[Files], Handler],
    response: str | None,
    method: Literal["GET", "POST", "DELETE"] = "GET",
) -> PlainEndpoint:
    return PlainEndpoint(
        name=name,
        paths=(path,),
        summary=summary,
        method=method,
        response=response,
        schemas=_SCHEMAS,
        content_type="application/json" if response is not None else "application/octet-stream",
        handler=lambda service: handler(Files(service)),
    )


PAGE_ENDS: dict[str, Schema] = {"first_id": or_null(TEXT), "last_id": or_null(TEXT), "has_more": FLAG}
_SCHEMAS: dict[str, Schema] = {
    "File": record(
        {
            "id": TEXT,
            "object": {"const": "file"},
            "bytes": WHOLE,
            "created_at": WHOLE,
            "expires_at": {"type": "null"},
            "filename": TEXT,
            "purpose": TEXT,
            "status": TEXT,
            "status_details": {"type": "null"},
        }
    ),
    "FileList": record({"object": {"const": "list"}, "data": many(ref("File")), **PAGE_ENDS}),
    "DeletedFile": record({"id": TEXT, "object": {"const": "file"}, "deleted": FLAG}),
}
FILES: tuple[Endpoint, ...] = (
    _route(
        "files_upload", "/v1/files", "Upload a file (multipart/form-data)", lambda files: files.upload, "File", "POST"
    ),
    _route("files_list", "/v1/files", "The files of this key", lambda files: files.listing, "FileList"),
    _route("files_get", "/v1/files/{file_id}", "One file", lambda files: files.get, "File"),
    _route("files_delete", "/v1/files/{file_id}", "Delete a file", lambda files: files.delete, "DeletedFile", "DELETE"),
    _route("files_content", "/v1/files/{file_id}/content", "The content of a file", lambda files: files.content, None),
)
