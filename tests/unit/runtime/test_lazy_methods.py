"""Dataclasses that compile their methods when they are first called."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from dataclasses import dataclass, field, replace

import pytest

from quire.runtime.lazy_methods import lazy_methods

is_lazy = pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 compiles all methods of a class at once")

with lazy_methods():

    @dataclass(frozen=True, slots=True, order=True)
    class Point:
        """A point."""

        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)

    @dataclass
    class Base:
        """A base."""

        number: int

    @dataclass
    class Derived(Base):
        """A derived class, which calls its base."""

        double: int = field(init=False)

        def __post_init__(self) -> None:
            Base.__init__(self, self.number + 1)
            self.double = 2 * self.number


@dataclass(frozen=True, slots=True, order=True)
class Plain:
    """A point whose methods are compiled at once."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list, compare=False)


def test_methods_do_what_those_of_other_dataclasses_do() -> None:
    point, plain = Point(1), Plain(1)
    assert repr(point) == repr(plain).replace("Plain", "Point") == "Point(x=1, y=2, tags=[])"
    assert point == Point(1, tags=["other"]) != Point(2)
    assert point != plain
    assert hash(point) == hash(plain)
    assert Point(1) < Point(2) <= Point(2, 2)
    assert replace(point, y=5) == Point(1, 5)
    assert copy.copy(point) == pickle.loads(pickle.dumps(point)) == point
    assert point.tags is not Point(1).tags
    assert dataclasses.asdict(point) == dataclasses.asdict(plain)


@pytest.mark.parametrize("made", [Point(1), Plain(1)], ids=["lazy", "compiled at once"])
def test_a_frozen_object_cannot_be_changed(made: Point | Plain) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        made.x = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del made.x


def test_wrong_arguments_are_refused_as_by_other_dataclasses() -> None:
    for arguments in ((), (1, 2, [], 4)):
        with pytest.raises(TypeError) as plain:
            Plain(*arguments)
        with pytest.raises(TypeError) as lazy:
            Point(*arguments)
        assert str(lazy.value) == str(plain.value).replace("Plain", "Point")


def test_a_method_may_first_be_called_for_a_derived_class() -> None:
    assert Derived(3) == Derived(3)
    assert (Derived(3).number, Derived(3).double) == (4, 8)
    assert repr(Base(1)).endswith("Base(number=1)")


@is_lazy
def test_a_method_is_compiled_once_and_then_replaces_the_lazy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_method = dataclasses._create_fn  # type: ignore[attr-defined]

    def count(name: str, *arguments: object, **options: object) -> object:
        compiled.append(name)
        return compile_method(name, *arguments, **options)

    monkeypatch.setattr(dataclasses, "_create_fn", count)
    with lazy_methods():
        made = dataclasses.make_dataclass("Made", [("x", int)])
    assert compiled == []
    for _ in range(3):
        assert made(1) == made(1)
        assert repr(made(2)) == "Made(x=2)"
    assert sorted(compiled) == ["__eq__", "__init__", "__repr__"]
    assert list(inspect.signature(made).parameters) == ["x"]
    assert made.__init__.__qualname__ == "Made.__init__"


@is_lazy
def test_dataclasses_declared_later_are_compiled_at_once() -> None:
    compile_method = dataclasses._create_fn  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), lazy_methods():
        assert dataclasses._create_fn is not compile_method  # type: ignore[attr-defined]
        _ = 1 / 0
    assert dataclasses._create_fn is compile_method  # type: ignore[attr-defined]
