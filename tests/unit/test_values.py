"""Dataclasses of ours against those of the standard library: whoever uses one cannot tell which it is."""

import builtins
import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any, ClassVar

import pytest

from elsewhere import values

MAKERS: dict[str, Callable[..., Any]] = {"ours": values.dataclass, "theirs": dataclasses.dataclass}


class Floor:
    __slots__ = ()

    def doubled(self) -> int:
        return 2 * self.number  # type: ignore[attr-defined,no-any-return]


@values.dataclass(frozen=True, slots=True)
class Travels:
    number: int
    words: tuple[str, ...] = ()


def frozen(make: Callable[..., Any]) -> Any:
    @make(frozen=True, slots=True)
    class Value(Floor):
        """What it is."""

        number: int
        name: str = "one"
        words: list[str] = field(default_factory=list)
        secret: str = field(default="", repr=False)
        place: str = field(default="", compare=False)
        shared: ClassVar[int] = 7

    return Value


def changing(make: Callable[..., Any]) -> Any:
    @make(slots=True)
    class Value:
        number: int
        words: dict[str, int] = field(default_factory=dict)

        def __post_init__(self) -> None:
            self.number += 1

    return Value


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MAKERS[request.param]


def test_a_frozen_one(make: Callable[..., Any]) -> None:
    cls = frozen(make)
    one = cls(1, words=["a"], secret="s", place="here")
    assert (one.number, one.name, one.words, one.secret, one.place, one.shared) == (1, "one", ["a"], "s", "here", 7)
    assert one.doubled() == 2
    assert repr(one) == f"{cls.__qualname__}(number=1, name='one', words=['a'], place='here')"
    assert one == cls(1, "one", ["a"], "s", "there")
    assert one != cls(1, "two", ["a"], "s")
    assert one != cls(1, "one", ["a"], "t")
    assert one != (1, "one", ["a"], "s")
    assert cls(1).words is not cls(1).words
    for change in (lambda: setattr(one, "number", 2), lambda: delattr(one, "number"), lambda: setattr(one, "other", 2)):
        with pytest.raises((FrozenInstanceError, TypeError)):
            change()
    assert not hasattr(one, "__dict__")
    assert cls.__doc__ == "What it is."


def test_a_frozen_one_is_a_key(make: Callable[..., Any]) -> None:
    @make(frozen=True, slots=True)
    class Key:
        one: str
        two: str = field(default="", compare=False)

    @make(frozen=True, slots=True)
    class Nothing:
        pass

    assert {Key("a", "b"): 1}[Key("a", "c")] == 1
    assert {Nothing(): 1}[Nothing()] == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(frozen(make)(1))


def test_one_that_changes(make: Callable[..., Any]) -> None:
    cls = changing(make)
    one = cls(1)
    one.words["a"] = 1
    one.number += 1
    assert (one.number, one.words) == (3, {"a": 1})
    assert cls(1).words == {}
    assert one == cls(2, {"a": 1})
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(AttributeError):
        one.other = 1


def test_without_comparison_each_is_its_own(make: Callable[..., Any]) -> None:
    @make(slots=True, eq=False)
    class Own:
        number: int

    one = Own(1)
    assert one != Own(1)
    assert {one: 1}[one] == 1


def test_what_the_standard_library_does_with_them(make: Callable[..., Any]) -> None:
    cls = frozen(make)
    one = cls(1)
    assert replace(one, name="two") == cls(1, "two")
    assert asdict(one) == {"number": 1, "name": "one", "words": [], "secret": "", "place": ""}
    assert [item.name for item in fields(cls)] == ["number", "name", "words", "secret", "place"]
    assert dataclasses.is_dataclass(one)
    assert copy.deepcopy(one) == one
    assert list(inspect.signature(cls).parameters) == ["number", "name", "words", "secret", "place"]
    assert inspect.signature(cls).parameters["name"].default == "one"
    assert inspect.signature(cls).parameters["number"].annotation in (int, "int")


def test_it_travels() -> None:
    assert pickle.loads(pickle.dumps(Travels(1, ("a",)))) == Travels(1, ("a",))


@pytest.mark.parametrize(
    ("given", "more"), [((), {}), ((1, "a", [], "", "", 6), {}), ((1,), {"number": 2}), ((1,), {"nonsense": 2})], ids=repr
)
def test_wrong_arguments_are_refused(make: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="__init__"):
        frozen(make)(*given, **more)


def test_a_method_of_the_class_itself_stays(make: Callable[..., Any]) -> None:
    @make(frozen=True, slots=True)
    class Named:
        number: int

        def __repr__(self) -> str:
            return "mine"

    assert repr(Named(1)) == "mine"


def test_one_that_contains_itself_can_be_shown() -> None:
    one = changing(values.dataclass)(1)
    one.words["self"] = one
    assert "..." in repr(one)


@pytest.mark.parametrize("kind", [frozen, changing])
def test_one_thing_is_compiled_for_a_class(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: the standard library compiles each method of each class."""
    counts = {}
    real = builtins.exec
    for name, make in MAKERS.items():
        sources: list[object] = []
        monkeypatch.setattr(builtins, "exec", lambda source, *more, seen=sources: (seen.append(source), real(source, *more))[1])
        kind(make)
        monkeypatch.undo()
        counts[name] = len(sources)
    assert counts["ours"] == 1
    assert counts["theirs"] > 1 or sys.version_info >= (3, 13)
