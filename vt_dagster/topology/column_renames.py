"""Renamed columns: where earlier names are stored, and how they are matched.

Files identify a column by name, so old rows have it under an earlier name. The metadata of a field, in
a table's schema and in a declared one, lists its earlier names; readers return the value under the
current name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pyspark.sql.types import DataType, StructField, StructType

from vt_dagster.columns import OLD, RESERVED, TIMESTAMP, WAS
from vt_dagster.errors import TopologyError

Names = Mapping[str, tuple[str, ...]]
"""Earlier names by column, the newest first."""

_TOKEN = re.compile(r"'(?:[^']|'')*'|`[^`]+`|\w+|\s+|.", re.DOTALL)


def was(field: StructField) -> tuple[str, ...]:
    """Returns the earlier names of a field, the newest first."""
    return tuple((field.metadata or {}).get(WAS, ()))


def named(name: str, kind: DataType, before: Sequence[str]) -> StructField:
    """Makes a field with earlier names."""
    return StructField(name, kind, metadata={WAS: list(before)} if before else None)


def earlier_names(columns: StructType) -> set[str]:
    """Returns all earlier names of columns."""
    return {name for field in columns.fields for name in was(field)}


def noted(columns: StructType, like: StructType) -> StructType:
    """Returns columns with the earlier names that ``like`` has for them, also inside ``old``."""
    known = {f.name: f for f in like.fields}

    def one(field: StructField) -> StructField:
        other, kind = known.get(field.name), field.dataType
        if field.name == OLD and isinstance(kind, StructType):
            inner = other.dataType if other is not None else None
            kind = noted(kind, inner) if isinstance(inner, StructType) else kind
        return named(field.name, kind, () if other is None else was(other))

    return StructType([one(f) for f in columns.fields])


def with_all_names(columns: StructType, stored: StructType) -> StructType:
    """Returns columns with their own earlier names and those stored in a table's schema."""
    groups = [{f.name, *was(f)} for f in stored.fields if was(f)]

    def one(field: StructField) -> StructField:
        kind, names = field.dataType, dict.fromkeys((field.name, *was(field)))
        for group in groups:
            if group & names.keys():
                names |= dict.fromkeys(sorted(group))
        inner = next((f.dataType for f in stored.fields if f.name == OLD), None)
        if field.name == OLD and isinstance(kind, StructType) and isinstance(inner, StructType):
            kind = with_all_names(kind, inner)
        return named(field.name, kind, [n for n in names if n != field.name])

    return StructType([one(f) for f in columns.fields])


def names_before(asset: str, renamed: Mapping[str, str], schema: StructType) -> Names:
    """Returns the earlier names by column, from a declared ``{old: new}`` with an entry per old name.

    Raises:
        TopologyError: the new name is not a column, or the old one is.
    """
    found: dict[str, tuple[str, ...]] = {}
    columns = {name.lower() for name in schema.names}
    for old in renamed:
        new, seen = renamed[old], {old}
        while new in renamed and new not in seen:
            seen.add(new)
            new = renamed[new]
        odd = {old.lower(), new.lower()} & {TIMESTAMP, *RESERVED}
        if old.lower() in columns or new not in schema.names or odd:
            raise TopologyError(
                f"{asset}: expected renamed to map earlier column names to current ones, as "
                f"{{'before': 'now'}}, where only the current name is a column, got {old!r}: {new!r} "
                f"with the columns {schema.names}; correct or remove the entry"
            )
        found[new] = (old, *found.get(new, ()))
    return found


def same_meaning(now: str, then: str, sides: Sequence[Names], own: Names) -> bool:
    """Returns whether two values of an operator's ``meaning`` are equal except for renamed columns.

    Args:
        now, then: SQL with column names, as declared now and in an earlier commit.
        sides: earlier names of the columns of its inputs, the left one first.
        own: earlier names of the columns of its result.
    """
    if now == then:
        return True
    return re.fullmatch(_pattern(now, sides, own), then) is not None


def _pattern(text: str, sides: Sequence[Names], own: Names) -> str:
    """Returns a regex for a text under all earlier names of its columns."""
    tokens, found, i = _TOKEN.findall(text), list[str](), 0
    while i < len(tokens):
        token, name = tokens[i], tokens[i].strip("`")
        side = tokens[i - 2].lower() if i > 1 and tokens[i - 1] == "." else ""
        if side in ("left", "right"):
            before = sides[0 if side == "left" else -1].get(name, ())
        else:
            of_input = sides[0].get(name, ()) if sides else ()
            before = tuple(dict.fromkeys((*of_input, *own.get(name, ()))))
        i += 1
        if not before or token.startswith("'"):
            found.append(re.escape(token))
            continue
        either = f"(?:{'|'.join(map(_quoted, (name, *before)))})"
        alias = re.fullmatch(r"\s+as\s+(`[^`]+`|\w+)", "".join(tokens[i : i + 4]), re.IGNORECASE)
        if alias is None:
            # 'right.new' selects the same as 'right.old as new' before.
            found.append(f"{either}(?: as {_quoted(name)})?")
        elif alias[1].strip("`") in before:
            # 'right.new as old' selects the same as 'right.old' before.
            old = _quoted(alias[1].strip("`"))
            found.append(f"(?:{either} as {old}|{old})")
            i += 4
        else:
            found.append(either)
    return "".join(found)


def _quoted(name: str) -> str:
    return f"`?{re.escape(name)}`?"
