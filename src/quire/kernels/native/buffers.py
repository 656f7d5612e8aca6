"""Memory planning for the buffers of a program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def lay_out_buffers(
    widths: Sequence[int], uses: Sequence[Sequence[int]], given: Collection[int], names: Mapping[int, int]
) -> tuple[list[int], int]:
    """Assign an offset to each buffer, in elements per row, and return the offsets and the total size. Buffers whose
    lifetimes do not overlap share memory.

    widths: of each buffer; uses: the buffers that each operation uses; given: buffers whose memory the caller supplies;
    names: buffers that may alias another one.
    """
    uses = [(*some, *(names[buffer] for buffer in some if buffer in names)) for some in uses]
    last = {buffer: place for place, some in enumerate(uses) for buffer in some}
    free: list[tuple[int, int]] = []  # width, offset
    held: dict[int, tuple[int, int]] = {}
    offsets, room = [0] * len(widths), 0
    for place, some in enumerate(uses):
        for buffer in dict.fromkeys(some):
            if buffer in given or buffer in held:
                continue
            width = widths[buffer]
            fitting = [spot for spot in free if spot[0] >= width]
            if fitting:
                spot = min(fitting)
                free.remove(spot)
            else:
                spot, room = (width, room), room + width
            held[buffer], offsets[buffer] = spot, spot[1]
        free += [held[buffer] for buffer in dict.fromkeys(some) if buffer in held and last[buffer] == place]
    return offsets, room
