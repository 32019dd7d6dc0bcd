"""HTML and SVG by function calls, escaped unless said otherwise."""

from __future__ import annotations

import html


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


VOID = {"meta", "link", "img", "br"}


def tag(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Markup:
    """An element; children that are not `Markup` are escaped.

    An attribute is called `class_` or `aria_label` where Python has no room for `class` and `aria-label`; one that is
    None or False is left out, True stands without a value, and a float is cut to a tenth, which is enough for a pixel.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Elements one after the other."""
    return Markup(
        "".join(child if isinstance(child, Markup) else html.escape(child, quote=False) for child in children)
    )


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else html.escape(str(value))
    return f' {name}="{text}"'
