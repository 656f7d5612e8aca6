"""Every benchmark that can be run is listed, and described where people look for it."""

from __future__ import annotations

from pathlib import Path

import benchmarks.__main__ as listing

FOLDER = Path(listing.__file__).parent


def runnable() -> set[str]:
    """The names of all modules and packages that `python -m benchmarks.NAME` runs."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        if '__name__ == "__main__"' in path.read_text() and path != FOLDER / "__main__.py":
            place = path.parent if path.name == "__main__.py" else path.with_suffix("")
            found.add(".".join(place.relative_to(FOLDER).parts))
    return found


def test_every_benchmark_is_listed_once() -> None:
    assert not set(listing.BENCHMARKS) & set(listing.GPU_BENCHMARKS)
    assert runnable() >= set(listing.BENCHMARKS) | set(listing.GPU_BENCHMARKS)
    parts = {"cpu.worker"}  # started by another benchmark
    assert runnable() - parts == set(listing.BENCHMARKS) | set(listing.GPU_BENCHMARKS)


def test_the_readme_has_a_line_for_every_benchmark() -> None:
    readme = (FOLDER / "README.md").read_text()
    names = [*listing.BENCHMARKS, *listing.GPU_BENCHMARKS]
    assert [name for name in names if f"`python -m benchmarks.{name}" not in readme] == []
