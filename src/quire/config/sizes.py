"""Sizes in bytes as users write and read them: "2GiB", "512 MB", 1073741824."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.types.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(setting: str, value: int | str) -> int:
    """Return the bytes of a size. Raises ConfigError, naming `setting`, if `value` is not a size."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(setting, f"must be a number of bytes or a size, got {value!r}", 'write for example "2GiB"')
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(setting, f"{value!r} is not a size", 'write for example "2GiB" or "512MiB"')
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(setting, f"must be above 0 bytes, got {value!r}", 'write for example "2GiB"')
    return size


def format_size(num_bytes: int) -> str:
    """Format a size with a binary unit and three digits: "1.46 GiB"."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            value = size / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{size} B"


def format_table(lines: Sequence[tuple[str, int, str]]) -> list[str]:
    """Format lines of name, size and note in aligned columns."""
    names, sizes = [name for name, _, _ in lines], [format_size(size) for _, size, _ in lines]
    wide, long = max(map(len, names)), max(map(len, sizes))
    notes = [note for _, _, note in lines]
    rows = zip(names, sizes, notes, strict=True)
    return [f"  {name:<{wide}}  {size:>{long}}  {note}".rstrip() for name, size, note in rows]


def describe_shortage(needed: int, capacity: int, device: str) -> str:
    """Return the reason why something does not fit into the memory of a device."""
    return f"{format_size(needed)} are needed, {format_size(capacity)} are available on {device}"


def at_least(num_bytes: int) -> str:
    """Format a size as a setting: rounded up to whole MiB."""
    return f"{-(-num_bytes // MIB)}MiB"


def at_most(num_bytes: int) -> str:
    """Format a size as a setting: rounded down to whole MiB, or in bytes if below one MiB."""
    return f"{num_bytes // MIB}MiB" if num_bytes >= MIB else str(num_bytes)
