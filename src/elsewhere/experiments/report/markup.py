"""HTML by construction: an element escapes every child and every attribute that is not markup already, and shows control
characters as numbers, so that nothing has to be remembered where text is put in. Knows nothing of what is told."""

import html

from elsewhere.experiments.report.words import fit

__all__ = ["Markup", "element", "joined"]

_EMPTY = frozenset(("meta", "input", "br", "col", "rect", "path", "line", "circle"))


class Markup(str):
    """Text that is HTML. Only this module, and whoever wrote the text themselves, makes it."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """`class_` is `class`, `aria_label` is `aria-label`; an attribute that is None or False is left out, as is a child that is
    None."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None and value is not False)
    if name in _EMPTY:
        return Markup(f"<{name}{shown}>" if name in ("meta", "input", "br", "col") else f"<{name}{shown}/>")
    return Markup(f"<{name}{shown}>{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    return Markup("".join(_child(child) for child in children if child is not None))


def _child(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(fit(str(child)))


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(fit(str(value)))}"'
