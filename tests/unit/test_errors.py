"""The one tree of errors: as its module draws it, and in the one shape in which an error leaves the product."""

import copy
import json
import pickle
import re

import pytest

from elsewhere import errors
from elsewhere.errors import CheckFailed, Conflict, ElsewhereError, UsageError

DRAWN = dict(re.findall(r"[├└]── (\w+) .*\(also (\w+)", errors.__doc__ or ""))
CLASSES = {name: getattr(errors, name) for name in errors.__all__}


def test_the_drawn_tree_is_the_defined_tree() -> None:
    defined = {name for name, found in vars(errors).items() if isinstance(found, type)}
    assert set(DRAWN) | {"ElsewhereError"} == defined == set(errors.__all__)
    assert len(DRAWN) >= 7


@pytest.mark.parametrize(("name", "builtin"), DRAWN.items())
def test_each_error_is_ours_and_the_builtin_that_the_drawing_names(name: str, builtin: str) -> None:
    assert issubclass(CLASSES[name], ElsewhereError)
    assert issubclass(CLASSES[name], getattr(__import__("builtins"), builtin))


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_only_bad_usage_ends_with_2_a_conflict_with_3_and_a_failed_check_with_4(kind: type[ElsewhereError]) -> None:
    assert kind.exit_code == {UsageError: 2, Conflict: 3, CheckFailed: 4}.get(kind, 1)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_an_error_reads_as_its_message_and_has_one_shape_as_a_document(kind: type[ElsewhereError]) -> None:
    error = kind("some_code", "what happened", hint="what to do", detail={"value": 3})
    assert str(error) == "what happened"
    assert json.loads(json.dumps(error.document())) == {
        "error": {"code": "some_code", "message": "what happened", "detail": {"value": 3}, "hint": "what to do"}
    }


def test_hint_and_detail_may_be_missing_and_are_then_empty() -> None:
    assert ElsewhereError("code", "message").document() == {
        "error": {"code": "code", "message": "message", "detail": {}, "hint": ""}
    }


def test_the_details_of_two_errors_are_not_one_dictionary() -> None:
    one, other = ElsewhereError("a", "a"), ElsewhereError("b", "b")
    one.detail["key"] = "value"
    assert other.detail == {}


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
@pytest.mark.parametrize("through", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_survives_the_way_out_of_a_worker_process(kind: type[ElsewhereError], through: object) -> None:
    """An exception that cannot be unpickled breaks a whole process pool."""
    error = kind("some_code", "what happened", hint="what to do", detail={"value": 3})
    again = through(error)  # type: ignore[operator]
    assert type(again) is kind
    assert again.document() == error.document()
    assert str(again) == "what happened"
