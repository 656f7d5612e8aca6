"""Parses multipart/form-data bodies, as browsers and OpenAI's clients send them."""

from __future__ import annotations

from email.message import Message

from quire.types.errors import InvalidRequest

MAX_PARTS = 16
MAX_HEAD_BYTES = 8 * 2**10  # of one part, and of the Content-Type header: parsing parameters takes quadratic time
MAX_BOUNDARY = 200


def read_form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """Return the parts of a body by name, each as its file name (empty if none) and its data. Raises InvalidRequest.

    Copies the data, so call it in a thread.
    """
    if len(content_type) > MAX_HEAD_BYTES:
        raise InvalidRequest("content-type", f"is above {MAX_HEAD_BYTES} bytes", "send multipart/form-data")
    boundary = _parameter("content-type", content_type, "boundary")
    if not boundary or len(boundary) > MAX_BOUNDARY:
        raise InvalidRequest("content-type", "has no boundary", "send multipart/form-data; boundary=...")
    mark = b"--" + boundary.encode("latin-1", "replace")
    if not body.startswith(mark):
        raise InvalidRequest("body", "does not begin with its boundary", "send multipart/form-data")
    found: dict[str, tuple[str, bytes]] = {}
    place, num_parts = len(mark), 0
    while body[place : place + 2] == b"\r\n":
        num_parts += 1
        head_end = body.find(b"\r\n\r\n", place, place + MAX_HEAD_BYTES)
        end = body.find(b"\r\n" + mark, head_end + 2) if head_end >= 0 else -1
        if end < 0 or num_parts > MAX_PARTS:
            bounds = f"up to {MAX_PARTS} parts, each with a head of up to {MAX_HEAD_BYTES} bytes"
            raise InvalidRequest("body", f"is not multipart/form-data with {bounds}", "send the file as a form")
        disposition = _disposition(body[place + 2 : head_end])
        name = _parameter("body", disposition, "name")
        found[name] = (_parameter("body", disposition, "filename"), body[head_end + 4 : max(end, head_end + 4)])
        place = end + 2 + len(mark)
    if body[place : place + 2] != b"--":
        raise InvalidRequest("body", "ends before its last boundary", "send the whole form")
    return found


def _disposition(head: bytes) -> str:
    """Return the value of the Content-Disposition header; empty if there is none."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            return value.strip().decode("utf-8", "replace")
    return ""


def _parameter(where: str, header: str, name: str) -> str:
    """Return a parameter of a header; empty if it is missing. Raises InvalidRequest, which names `where`."""
    message = Message()
    message["content-type"] = header.replace("\r", " ").replace("\n", " ")
    try:
        value = message.get_param(name, "")
    except ValueError:
        raise InvalidRequest(where, "has a header whose parameters cannot be read", "write them plainly") from None
    return value if isinstance(value, str) else value[-1]
