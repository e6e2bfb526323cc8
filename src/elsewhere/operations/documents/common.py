"""What all documents have: names, which come with their bytes if they are not UTF-8, moments, errors."""

from __future__ import annotations

import base64
import os

from elsewhere.clock import stamp
from elsewhere.errors import ElsewhereError

__all__ = ["error_document", "moment", "name"]


def name(path: str) -> str | dict[str, str]:
    raw = os.fsencode(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"path": raw.decode("utf-8", "replace"), "path_b64": base64.b64encode(raw).decode()}


def moment(seconds: float | None) -> str | None:
    return None if seconds is None else stamp(seconds)


def error_document(problem: ElsewhereError) -> dict[str, object]:
    """Its document; names that are not UTF-8 come apart, in whatever list they are."""

    def apart(one: object) -> object:
        if isinstance(one, dict) and isinstance(one.get("path"), str):
            return {**one, "path": name(one["path"])}
        return name(one) if isinstance(one, str) else one

    detail = {key: [apart(one) for one in value] if isinstance(value, list) else value for key, value in problem.detail.items()}
    return type(problem)(problem.code, problem.message, hint=problem.hint, detail=detail).document()
