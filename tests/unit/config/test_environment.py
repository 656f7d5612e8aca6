"""Environment variables: read in one place, bad values refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.environment import read_environment
from quire.types.errors import ConfigError


def test_the_cache_is_where_the_user_says_or_where_caches_are(tmp_path: Path) -> None:
    assert read_environment({"QUIRE_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/xdg"}).cache == tmp_path
    assert read_environment({"XDG_CACHE_HOME": "/xdg"}).cache == Path("/xdg/quire")
    assert read_environment({"XDG_CACHE_HOME": "relative"}).cache == Path.home() / ".cache" / "quire"
    assert read_environment({}).cache == Path.home() / ".cache" / "quire"
    assert read_environment({"QUIRE_CACHE": "~/models"}).cache == Path.home() / "models"


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_offline_is_a_switch(value: str, offline: bool) -> None:
    assert read_environment({"QUIRE_OFFLINE": value}).offline is offline


@pytest.mark.parametrize(("value", "pinned"), [("1", True), ("0", False), ("", False)])
def test_threads_are_pinned_where_it_is_asked_for(value: str, pinned: bool) -> None:
    assert read_environment({"QUIRE_CPU_PIN": value}).cpu_pin is pinned
    assert not read_environment({}).cpu_pin


@pytest.mark.parametrize(("value", "used"), [("1", True), ("on", True), ("0", False), ("off", False), ("", True)])
def test_the_kernel_of_one_row_is_used_unless_it_is_switched_off(value: str, used: bool) -> None:
    assert read_environment({"QUIRE_ROW_PROGRAM": value}).row_program is used
    assert read_environment({}).row_program


@pytest.mark.parametrize(("value", "used"), [("1", True), ("0", False), ("", False)])
def test_the_kernel_of_coded_experts_is_used_where_it_is_asked_for(value: str, used: bool) -> None:
    assert read_environment({"QUIRE_CODED_EXPERTS": value}).coded_experts is used
    assert not read_environment({}).coded_experts


@pytest.mark.parametrize(
    ("name", "value"),
    [("QUIRE_ROW_PROGRAM", "2"), ("QUIRE_OFFLINE", "maybe"), ("QUIRE_CACHE", "relative/path"), ("QUIRE_CACHE", "")],
)
def test_a_bad_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_environment({name: value})


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="QUIRE_CACHE: .* is not a folder"):
        read_environment({"QUIRE_CACHE": str(tmp_path / "file")})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("QUIRE_APIKEY", "QUIRE_API_KEY"), ("QUIRE_CACHE_DIR", "QUIRE_CACHE"), ("QUIRE_CPU_PINN", "QUIRE_CPU_PIN")],
)
def test_a_mistyped_name_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: is not a variable of Quire; did you mean {meant}"):
        read_environment({name: "x"})


@pytest.mark.parametrize(
    "name", ["QUIRE_SERVICE_HOST", "QUIRE_CACHE_PORT", "QUIRE_PORT_8000_TCP_ADDR", "QUIRE_TEST_WHOLE", "MY_QUIRE_CACHE"]
)
def test_variables_of_others_are_none_of_quires(name: str) -> None:
    assert read_environment({name: "x"}) == read_environment({})
