"""`dataclass` as in the standard library, at an eighth of what it costs there to make a class.

The standard library compiles up to six functions for every class, when it is made; with some two hundred classes that was half
of the time that elsewhere took to load. Here all classes share what is the same for all of them, and only `__init__` is
compiled. What comes of it is a dataclass as any other: `fields`, `replace` and `asdict` know it, and so do type checkers.
"""

import dataclasses
import functools
import operator
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, slots: bool, frozen: bool = False, eq: bool = True) -> Callable[[type], type]:
        def made(described: type) -> type:
            described.__doc__ = described.__doc__ or described.__name__  # or a signature is put together for it
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False, slots=slots)(described)
            cls.__init__ = _initializer(cls, frozen=frozen)
            shared = {"__repr__": _repr}
            if eq:
                shared |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
            if frozen:
                shared |= _FROZEN
            for name, method in shared.items():
                if name not in described.__dict__:
                    setattr(cls, name, method)
            return cls

        return made


class _Made:
    """Stands for a default that is made anew each time."""

    def __repr__(self) -> str:
        return "<made>"


_MADE = _Made()


def _initializer(cls: Any, *, frozen: bool) -> Callable[..., None]:
    """Of a frozen class it goes past `__setattr__`, straight to the slots."""
    known: dict[str, Any] = {"made": _MADE}
    parameters, lines = ["self"], []
    for field in fields(cls):
        name = value = field.name
        default = ""
        if field.default is not MISSING:
            known[f"default_{name}"] = field.default
            default = f"=default_{name}"
        elif field.default_factory is not MISSING:
            known[f"make_{name}"] = field.default_factory
            default, value = "=made", f"make_{name}() if {name} is made else {name}"
        parameters.append(name + default)
        if frozen:
            known[f"set_{name}"] = getattr(cls, name).__set__
            lines.append(f"set_{name}(self, {value})")
        else:
            lines.append(f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), known)  # noqa: S102  (names of fields only)
    made: Callable[..., None] = known["__init__"]
    made.__annotations__ = {**{field.name: field.type for field in fields(cls)}, "return": None}
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return made


@functools.cache
def _compared(cls: Any) -> Callable[[Any], object]:
    """What tells one instance from another."""
    names = [field.name for field in fields(cls) if field.compare]
    return operator.attrgetter(*names) if names else lambda _: None


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    cls: Any = type(self)
    return _compared(cls)(self) == _compared(cls)(other)


def _hash(self: Any) -> int:
    return hash(_compared(self.__class__)(self))


def _set(self: Any, name: str, _: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r} of {type(self).__qualname__}")


def _delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r} of {type(self).__qualname__}")


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


_FROZEN = {"__setattr__": _set, "__delattr__": _delete, "__getstate__": _get_state, "__setstate__": _set_state}
