"""A stream or table with other settings than it was declared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

from vt_dagster.errors import ContractError, TopologyError
from vt_dagster.topology.durations import parse_length
from vt_dagster.topology.model import Stream, Table

_SHOWN = ("description", "group", "owners", "key_prefix")
_FIXED = frozenset(
    {"name", "schema", "operator", "contract", "inputs", "left", "right", "source", "sources"}
)


def with_settings(node: Stream, settings: Mapping[str, str]) -> Stream:
    """The same stream or table with other settings, of its operator or its own.

    Args:
        settings: by name; of a part by its path, ``window.grace``. Values are texts: lengths of time
            like ``2h``, JSON, or what they are.

    Raises:
        TopologyError: it has no such setting, or the value makes no sense.
    """
    for name, text in settings.items():
        first = name.partition(".")[0]
        operator: Any = node.operator
        if operator is not None and first in settable(operator):
            shown: dict[str, Any] = {one: getattr(node, one) for one in _SHOWN}
            if isinstance(node, Table):
                shown["freshness"] = node.freshness
            node = _set(node.name, operator, name, text).result(**shown)
        elif operator is None and first in settable(node):
            node = _set(node.name, node, name, text)
        else:
            there = settable(node if operator is None else operator)
            raise TopologyError(f"{node.name}: expected one of the settings {there}, got {name!r}")
    return node


def settable(owner: Any) -> list[str]:
    """The settings of an operator or a source asset."""
    return sorted(f.name for f in fields(owner) if f.name not in _FIXED)


def _set(asset: str, owner: Any, name: str, text: str) -> Any:
    first, _, rest = name.partition(".")
    there = settable(owner)
    if first not in there:
        raise TopologyError(f"{asset}: expected one of the settings {there}, got {first!r}")
    value = getattr(owner, first)
    if rest:
        if not is_dataclass(value):
            raise TopologyError(f"{asset}: expected a setting with parts, got {name!r} of {value!r}")
        return replace(owner, **{first: _set(asset, value, rest, text)})
    return replace(owner, **{first: _value(value, text)})


def _value(now: Any, text: str) -> Any:
    """A text as the kind of value that stands there now; where nothing does, what it looks like."""
    if isinstance(now, str):
        return text
    if now is None or isinstance(now, timedelta):
        try:
            return parse_length(text)
        except ContractError:
            if now is not None:
                raise
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return tuple(found) if isinstance(found, list) else found  # pyright: ignore
