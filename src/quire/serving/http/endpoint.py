"""The descriptor of an endpoint. The route table, the OpenAPI document, the reference page and the list of capabilities
are made from these descriptors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Handler
from quire.serving.http.fields import Field
from quire.serving.http.service import Service

Schema = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Endpoint(ABC):
    """One operation of the API: its paths, its request fields, its response schema and its handler.

    `name` is the operation id in OpenAPI and the endpoint's label in metrics. `response` and `event` name schemas, of
    this endpoint's `schemas` or of another's: that of the response body, and that of the data of one event of a stream.
    """

    name: str
    paths: tuple[str, ...]  # the first is documented; all are routed
    summary: str
    method: Literal["GET", "POST", "DELETE"] = "POST"
    fields: tuple[Field, ...] = ()
    response: str | None = None  # None: the response is not JSON
    event: str | None = None  # None: the response cannot be streamed
    error: str = "Error"  # the name of the schema of error responses
    query: tuple[str, ...] = ()  # query parameters that clients of this API send and that have no effect
    stream_type: str = "text/event-stream"  # the content type of a stream; anything else means lines of JSON
    ends_with_done: bool = True  # whether a stream ends with the event `[DONE]`
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    content_type: str = "application/json"  # of the response
    description: str = ""  # Markdown for the reference page
    write_error: Callable[[ApiError], bytes] = ApiError.body  # writes the body of an error response

    @abstractmethod
    def make_handler(self, service: Service) -> Handler:
        """Return the handler of this endpoint's requests at one edge."""

    @cached_property
    def fields_by_name(self) -> dict[str, Field]:
        return {one.name: one for one in self.fields}

    @property
    def documented_path(self) -> str:
        """The first path, in OpenAPI's notation."""
        return re.sub(r"\{(\w+):\w+\}", r"{\1}", self.paths[0])


@dataclass(frozen=True, kw_only=True)
class PlainEndpoint(Endpoint):
    """An endpoint whose handler is made by the function `handler`."""

    handler: Callable[[Service], Handler]

    def make_handler(self, service: Service) -> Handler:
        return self.handler(service)
