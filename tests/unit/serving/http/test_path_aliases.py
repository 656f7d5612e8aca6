"""Other spellings of paths: they lead to a route, and never past the check of keys."""

from __future__ import annotations

import pytest

from quire.serving.http.path_aliases import PathAliases, path_not_found

ROUTES = (
    *("/v1/chat/completions", "/v1/models", "/v1/models/{model:path}", "/tokenize", "/health", "/"),
    *("/admin/drain", "/admin/prefixes/{name:path}"),
)
ALIASES = PathAliases(None, ROUTES)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/models", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/tokenize/", "/tokenize"),
        ("/", "/"),
        ("/nothing", "/nothing"),
    ],
)
def test_a_path_in_another_spelling_leads_to_its_route(path: str, route: str) -> None:
    assert ALIASES.resolve(path) == route


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/admin/drain", "/v1/v1/admin/drain", "/openai/deployments/x/admin/drain", "//admin/drain"),
        *("/openai/admin/drain", "/v1//admin/drain", "/v1/models/../../admin/drain"),
    ],
)
def test_no_spelling_leads_to_an_admin_route_but_its_own(path: str) -> None:
    assert not ALIASES.resolve(path).startswith("/admin")


def test_a_path_that_is_not_there_is_answered_with_its_api_and_with_what_is_there() -> None:
    error = path_not_found("/v1/moderations", ROUTES)
    assert (error.status, error.code) == (404, "not_found")
    assert "does not have moderations (/v1/moderations)" in str(error)
    assert "/v1/chat/completions, /v1/models" in str(error)
    assert "there is nothing at /x\\x1b[0m" in str(path_not_found("/x\x1b[0m", ROUTES))


def test_a_misspelt_path_gets_a_suggestion() -> None:
    assert "did you mean /v1/chat/completions?" in str(path_not_found("/v1/chat/completion", ROUTES))


def test_an_api_that_is_there_is_not_said_to_be_missing() -> None:
    routes = [*ROUTES, "/v1/messages", "/api/chat"]
    for path in ("/v1/messages/batches", "/api/embed", "/messages/x"):
        assert "there is nothing at" in str(path_not_found(path, routes))
        assert "does not have" in str(path_not_found(path, ROUTES))
