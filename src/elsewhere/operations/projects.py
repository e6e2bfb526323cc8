"""Which project is meant, and whether elsewhere may be used here at all."""

import os

from elsewhere.errors import Refused
from elsewhere.meeting import default_state, home_directory
from elsewhere.paths import is_within
from elsewhere.sandbox import project
from elsewhere.sandbox.project import Project

__all__ = ["find_project", "refuse_inside"]


def find_project(chosen: str | None, directory: str) -> Project:
    home = home_directory()
    if chosen is not None:
        found = project.find(os.path.join(directory, chosen), home, chosen=True)
    else:
        found = project.find(directory, home)
    if is_within(found.path, os.path.realpath(default_state())):
        raise Refused(
            "project_in_state", f"the project {found.path!r} lies in elsewhere's own state directory", hint="work outside of it"
        )
    return found


def refuse_inside() -> None:
    """A sandbox's work must not make sandboxes of its own without end."""
    if os.environ.get("ELSEWHERE_SANDBOX_EXECUTION") == "true" and os.environ.get("ELSEWHERE_ALLOW_NESTED") != "1":
        raise Refused(
            "nested",
            f"this is a sandbox already ({os.environ.get('ELSEWHERE_SANDBOX_ID', 'of elsewhere')})",
            hint="if you mean it: ELSEWHERE_ALLOW_NESTED=1",
        )
