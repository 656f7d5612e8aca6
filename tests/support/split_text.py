"""Reading a text in pieces, cut in every way that matters, and what the parts come to when they are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quire.serving.text.parts import CallArguments, CallBegun, Part, PartReader, Said, Thought

Joined = list[tuple[str, ...]]


def joined(parts: Iterable[Part]) -> Joined:
    """Neighbours of one kind as one; calls without their ids, which are different every time."""
    found: Joined = []
    for part in parts:
        if isinstance(part, CallBegun):
            found.append(("call", part.name))
            continue
        kind = {Said: "said", Thought: "thought", CallArguments: "arguments"}[type(part)]
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + part.text)
        else:
            found.append((kind, part.text))
    return found


def read(make: Callable[[], PartReader], text: str, cuts: Iterable[int] = ()) -> Joined:
    reader, parts, place = make(), [], 0
    for cut in (*cuts, len(text)):
        parts += reader.push(text[place:cut])
        place = cut
    return joined([*parts, *reader.finish()])


def all_cuts(length: int) -> Iterator[tuple[int, ...]]:
    """Every place alone, every pair of places, and all of them at once."""
    yield tuple(range(length))
    for first in range(length):
        yield (first,)
        for second in range(first + 1, length):
            yield (first, second)
