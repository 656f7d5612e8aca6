"""OpenAI's batches: run the requests of a file in the background, and write the results to another file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.serving.http.batches.batch_store import ENDED, Batch
from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.files import PAGE_ENDS, page
from quire.serving.http.exchange import AsgiHandler, Exchange, Handler
from quire.serving.http.fields import Field, check_body
from quire.serving.http.json_body import decode_json
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Bounds, OneOf, Text
from quire.types.errors import InvalidRequest

MAX_LABELS = 16

DESCRIPTION = """\
Runs the requests of a file that was uploaded to `/v1/files` with `purpose=batch`: JSON lines with `custom_id`,
`method`, `url` and `body`. Other requests go first: a line starts only while no other request waits, and batches use at
most half of the sequences that the engine can run. A line that is invalid or fails gets a line in the error file; the
others are still run. Files and batches belong to the API key that created them. They are deleted when the server stops
unless it has `--files-dir`; then an interrupted batch continues at the next start."""


class Batches:
    """The handlers of batches. Lines of a batch may call the endpoints `targets`."""

    def __init__(self, service: Service, targets: Sequence[Endpoint]) -> None:
        self._service, self._runner = service, service.batches
        self._targets = targets
        for target in targets:
            handler = AsgiHandler(target.make_handler(service), target.write_error)
            self._runner.targets |= dict.fromkeys(target.paths, handler)

    def create(self, fields: dict[str, Field]) -> Handler:
        async def handle(exchange: Exchange) -> None:
            service, owner = self._service, exchange.principal
            strict = exchange.is_asked("strict") or service.config.strict
            with service.metered() as meter:
                body = await exchange.read_body(service.limits, meter.add)
                decoded = decode_json(body, service.limits["nesting"])
            given, exchange.warnings = check_body(fields, decoded, service.limits, strict=strict)
            source = await asyncio.to_thread(self._runner.files.get, owner, given["input_file_id"])
            if source.purpose != "batch":
                reason = f"has the purpose {source.purpose}"
                raise InvalidRequest("input_file_id", reason, "upload it with purpose=batch")
            await asyncio.to_thread(self._runner.files.check_room, owner, 2)  # for its output and error files
            create = self._runner.batches.create
            batch = await asyncio.to_thread(create, owner, given["endpoint"], source.id, given.get("metadata"))
            self._runner.launch(batch)
            await exchange.reply_json(batch.as_json())

        return handle

    async def listing(self, exchange: Exchange) -> None:
        batches = await asyncio.to_thread(self._runner.batches.owned_by, exchange.principal)
        await exchange.reply_json(page(exchange, [batch.as_json() for batch in batches]))

    async def get(self, exchange: Exchange) -> None:
        await exchange.reply_json((await self._batch(exchange)).as_json())

    async def cancel(self, exchange: Exchange) -> None:
        """Ask the edge that runs the batch to stop. Finished results are kept."""
        batch = await self._batch(exchange)
        if batch.status in ENDED:
            raise InvalidRequest("batch_id", f"this batch is {batch.status} already", "nothing is left to cancel")
        await asyncio.to_thread(self._runner.batches.ask_cancel, batch)
        batch.enter("cancelling")
        await exchange.reply_json(batch.as_json())

    async def _batch(self, exchange: Exchange) -> Batch:
        batch_id = str(exchange.scope["path_params"]["batch_id"])
        return await asyncio.to_thread(self._runner.batches.get, exchange.principal, batch_id)


@dataclass(frozen=True, slots=True)
class Metadata:
    """An object of at most MAX_LABELS short texts."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > MAX_LABELS:
            raise InvalidRequest(where, f"must be an object of at most {MAX_LABELS} texts")
        for name, text in value.items():
            Text("label").check(f"{where}.{name[:64]}", text, limits)
            Text("label").check(f"{where} name", name, limits)
        return value

    def schema(self, limits: Bounds) -> Schema:
        text = Text("label").schema(limits)
        names = {"maxLength": limits["label"]}
        return {"type": "object", "additionalProperties": text, "propertyNames": names, "maxProperties": MAX_LABELS}


def batch_endpoints(targets: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints for batches whose lines may call `targets`."""
    paths = tuple(path for target in targets for path in target.paths)
    fields = (
        Field("input_file_id", Text("label", 1), "The uploaded file with the requests.", is_required=True),
        Field("endpoint", OneOf(paths), "The endpoint that all lines call.", is_required=True),
        Field(
            "completion_window", OneOf(("24h",)), "After this time the batch expires; finished results are kept.", "24h"
        ),
        Field("metadata", Metadata(), "The client's own labels, returned with the batch."),
    )
    by_name = {field.name: field for field in fields}

    def route(
        name: str,
        path: str,
        summary: str,
        handler: Callable[[Batches], Handler],
        method: Literal["GET", "POST"] = "GET",
        **more: Any,
    ) -> PlainEndpoint:
        return PlainEndpoint(
            name=name,
            paths=(path,),
            summary=summary,
            method=method,
            schemas=_SCHEMAS,
            handler=lambda service: handler(Batches(service, targets)),
            **{"response": "Batch", **more},
        )

    return (
        route("batches_create", "/v1/batches", "Run the requests of a file in the background",
              lambda batches: batches.create(by_name), "POST", fields=fields, description=DESCRIPTION),
        route("batches_list", "/v1/batches", "The batches of this key", lambda batches: batches.listing,
              response="BatchList"),
        route("batches_get", "/v1/batches/{batch_id}", "One batch", lambda batches: batches.get),
        route("batches_cancel", "/v1/batches/{batch_id}/cancel", "Stop a batch", lambda batches: batches.cancel,
              "POST"),
    )  # fmt: skip


_TIME = or_null(WHOLE)
_SCHEMAS: dict[str, Schema] = {
    "Batch": record(
        {
            "id": TEXT,
            "object": {"const": "batch"},
            "endpoint": TEXT,
            "errors": or_null({"type": "object"}),
            "input_file_id": TEXT,
            "completion_window": TEXT,
            "status": TEXT,
            "output_file_id": or_null(TEXT),
            "error_file_id": or_null(TEXT),
            "created_at": WHOLE,
            "expires_at": WHOLE,
            "in_progress_at": _TIME,
            "finalizing_at": _TIME,
            "completed_at": _TIME,
            "failed_at": _TIME,
            "expired_at": _TIME,
            "cancelling_at": _TIME,
            "cancelled_at": _TIME,
            "request_counts": record({"total": WHOLE, "completed": WHOLE, "failed": WHOLE}),
            "metadata": or_null({"type": "object"}),
        }
    ),
    "BatchList": record({"object": {"const": "list"}, "data": many(ref("Batch")), **PAGE_ENDS}),
}
