"""What is written down is read by every edge."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from quire.serving.desk.prefix_book import BookedPrefix, PrefixBook

ONE, OTHER = BookedPrefix("a", "", (1, 2)), BookedPrefix("a", "key", (1, 2))


@pytest.mark.parametrize("in_file", [False, True])
def test_entries_are_replaced_by_name_and_owner_and_removed_by_name(tmp_path: Path, in_file: bool) -> None:
    book = PrefixBook(tmp_path / "prefixes" if in_file else None)
    assert book.entries() == ()
    book.add([ONE, OTHER])
    book.add([BookedPrefix("a", "", (3,)), BookedPrefix("b", "", (4,))])
    assert book.entries() == (OTHER, BookedPrefix("a", "", (3,)), BookedPrefix("b", "", (4,)))
    book.remove("a")
    assert [booked.name for booked in book.entries()] == ["b"]
    book.clear()
    assert book.entries() == ()


def test_two_edges_read_the_same_file_which_others_cannot(tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    PrefixBook(path).add([ONE])
    assert PrefixBook(path).entries() == (ONE,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
