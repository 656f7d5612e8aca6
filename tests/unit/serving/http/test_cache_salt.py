"""A tenant's salt is its own."""

from __future__ import annotations

import hashlib

from quire.serving.http.request_head import cache_salt

ONE, OTHER = (hashlib.sha256(key).hexdigest() for key in (b"sk-one", b"sk-other"))


def test_without_key_and_wish_everybody_has_the_empty_salt() -> None:
    assert cache_salt("", "") == ""
    assert cache_salt(ONE, "", is_shared=True) == ""


def test_every_key_and_every_wish_makes_another_salt() -> None:
    pairs = [("", "a"), (ONE, ""), (OTHER, ""), (ONE, "a"), (OTHER, "a"), (ONE, "b"), (ONE, "\ud800")]
    assert len({cache_salt(*pair) for pair in pairs}) == len(pairs)


def test_nobody_without_the_key_can_ask_for_its_salt() -> None:
    salt = cache_salt(ONE, "")
    for wish in (ONE, salt, f"{len(ONE)}:{ONE}", ""):
        assert cache_salt(OTHER, wish) != salt
        assert cache_salt("", wish) != salt


def test_clients_that_share_are_told_apart_by_their_wishes_alone() -> None:
    assert cache_salt(ONE, "a", is_shared=True) == cache_salt(OTHER, "a", is_shared=True)
    assert cache_salt(ONE, "a", is_shared=True) != cache_salt(ONE, "b", is_shared=True)


def test_a_salt_is_the_same_after_a_restart() -> None:
    assert cache_salt(ONE, "a") == cache_salt(ONE, "a")
