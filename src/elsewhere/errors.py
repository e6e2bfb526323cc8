"""Every error that elsewhere raises on purpose.

    ElsewhereError            code, message, detail, hint
    ├── UsageError            bad input: names the value and what was expected           (also ValueError; exit code 2)
    ├── Refused               allowed by nobody: the request itself is unsafe            (also PermissionError)
    ├── NotFound              no such sandbox, project or command                        (also LookupError)
    ├── InUse                 somebody else holds it                                     (also RuntimeError)
    ├── StateError            the state directory cannot be used                         (also RuntimeError)
    ├── Conflict              both sides changed the same: nothing was done               (also RuntimeError; exit code 3)
    ├── CheckFailed           a check or a deploy failed: the stage is as it was          (also RuntimeError; exit code 4)
    ├── Unavailable           this host cannot do it; `reasons` says which rung lacked what (also RuntimeError)
    └── Broken                something of ours died or answered nonsense                (also RuntimeError)

A code is stable and may be matched by programs; a message may change. `document()` is the one shape in which an error
leaves the product: {"error": {"code", "message", "detail", "hint"}}.
"""

__all__ = [
    "Broken",
    "CheckFailed",
    "Conflict",
    "ElsewhereError",
    "InUse",
    "NotFound",
    "Refused",
    "StateError",
    "Unavailable",
    "UsageError",
]


class ElsewhereError(Exception):
    """Base of the tree; catch this to catch everything that elsewhere raises on purpose."""

    exit_code = 1

    def __init__(self, code: str, message: str, *, hint: str = "", detail: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.detail = detail or {}
        self.journaled = False  # whether the request that it ended has its record already

    def document(self) -> dict[str, object]:
        return {"error": {"code": self.code, "message": self.message, "detail": self.detail, "hint": self.hint}}

    def __reduce__(self) -> tuple[object, ...]:
        """Exceptions are rebuilt from `args`, which is the message alone; whoever pickles them wants all of it."""
        return _rebuilt, (type(self), self.code, self.message, self.hint, self.detail)


def _rebuilt(kind: type[ElsewhereError], code: str, message: str, hint: str, detail: dict[str, object]) -> ElsewhereError:
    return kind(code, message, hint=hint, detail=detail)


class UsageError(ElsewhereError, ValueError):
    exit_code = 2


class Refused(ElsewhereError, PermissionError):
    pass


class NotFound(ElsewhereError, LookupError):
    pass


class InUse(ElsewhereError, RuntimeError):
    pass


class StateError(ElsewhereError, RuntimeError):
    pass


class Conflict(ElsewhereError, RuntimeError):
    """Both sides changed the same; nothing was done."""

    exit_code = 3


class CheckFailed(ElsewhereError, RuntimeError):
    """A check or a deploy failed; the stage is as it was."""

    exit_code = 4


class Unavailable(ElsewhereError, RuntimeError):
    pass


class Broken(ElsewhereError, RuntimeError):
    pass
