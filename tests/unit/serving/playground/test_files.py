"""The page as the server gets it."""

from __future__ import annotations

import re

import pytest

from quire.serving.playground import INDEX, etag, files

MODULES = sorted(name for name in files() if name.endswith(".js"))
LINK = re.compile(r'(?:href|src)="([^"#]+)"')


def text(name: str) -> str:
    return files()[name][0].decode()


def test_every_file_has_a_media_type_and_the_page_is_among_them() -> None:
    assert files()[INDEX][1] == "text/html; charset=utf-8"
    assert files()["main.js"][1] == "text/javascript; charset=utf-8"
    assert {media_type for _, media_type in files().values()} == {
        "text/html; charset=utf-8",
        "text/javascript; charset=utf-8",
        "text/css; charset=utf-8",
        "image/svg+xml",
    }


def test_the_page_links_only_to_files_that_are_there() -> None:
    links = LINK.findall(text(INDEX))
    assert links
    assert {link.removeprefix("playground/") for link in links} <= set(files())


def test_every_module_is_loaded_ahead_and_every_import_is_there() -> None:
    preloaded = re.findall(r'rel="modulepreload" href="playground/([^"]+)"', text(INDEX))
    assert sorted(preloaded) == [name for name in MODULES if name not in ("main.js", "theme.js")]
    for name in MODULES:
        assert set(re.findall(r'^import .* from "\./([^"]+)";', text(name), re.MULTILINE)) <= set(MODULES)


@pytest.mark.parametrize("name", sorted(files()))
def test_no_file_names_another_host(name: str) -> None:
    addresses = set(re.findall(r"https?://[^\"'\s)]+", text(name)))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a namespace, never fetched


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_short_and_never_turn_text_into_markup(name: str) -> None:
    assert text(name).count("\n") <= 400
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text(name))


def test_the_validator_of_a_file_changes_with_the_file_only() -> None:
    assert etag(INDEX) == etag(INDEX)
    assert re.fullmatch(r'"[0-9a-f]{32}"', etag(INDEX))
    assert len({etag(name) for name in files()}) == len(files())
    with pytest.raises(KeyError):
        etag("../../cli/serve.py")
