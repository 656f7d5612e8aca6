"""What is written down is read by every edge."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from quire.serving.http.pinned_prefix_file import PinnedPrefixEntry, PinnedPrefixFile

ONE, OTHER = PinnedPrefixEntry("a", "", (1, 2)), PinnedPrefixEntry("a", "key", (1, 2))


@pytest.mark.parametrize("in_file", [False, True])
def test_entries_are_replaced_by_name_and_owner_and_removed_by_name(tmp_path: Path, in_file: bool) -> None:
    book = PinnedPrefixFile(tmp_path / "prefixes" if in_file else None)
    assert book.entries() == ()
    book.add([ONE, OTHER])
    book.add([PinnedPrefixEntry("a", "", (3,)), PinnedPrefixEntry("b", "", (4,))])
    assert book.entries() == (OTHER, PinnedPrefixEntry("a", "", (3,)), PinnedPrefixEntry("b", "", (4,)))
    book.remove("a")
    assert [entry.name for entry in book.entries()] == ["b"]
    book.clear()
    assert book.entries() == ()


def test_two_edges_read_the_same_file_which_others_cannot(tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    PinnedPrefixFile(path).add([ONE])
    assert PinnedPrefixFile(path).entries() == (ONE,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
