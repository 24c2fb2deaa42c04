"""Columns that had other names before: what is said of them, and what else means the same by it.

A file knows a column by its name alone, so rows of before have it under its earlier ones. A field says
by its metadata which these are, in a table's schema as in those that are made of a declaration; whoever
reads rows gives the value under the newest name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pyspark.sql.types import DataType, StructField, StructType

from vt_dagster.columns import OLD, RESERVED, TIMESTAMP, WAS
from vt_dagster.errors import TopologyError

Names = Mapping[str, tuple[str, ...]]
"""By column: the names that it had before, the newest first."""

_TOKEN = re.compile(r"'(?:[^']|'')*'|`[^`]+`|\w+|\s+|.", re.DOTALL)


def was(field: StructField) -> tuple[str, ...]:
    """The names that a field had before, the newest first."""
    return tuple((field.metadata or {}).get(WAS, ()))


def named(name: str, kind: DataType, before: Sequence[str]) -> StructField:
    """A field that had other names before."""
    return StructField(name, kind, metadata={WAS: list(before)} if before else None)


def earlier_names(columns: StructType) -> set[str]:
    """All names by which rows of before know columns."""
    return {name for field in columns.fields for name in was(field)}


def noted(columns: StructType, like: StructType) -> StructType:
    """Columns with what others of the same names say of their earlier names, within ``old`` too."""
    known = {f.name: f for f in like.fields}

    def one(field: StructField) -> StructField:
        other, kind = known.get(field.name), field.dataType
        if field.name == OLD and isinstance(kind, StructType):
            inner = other.dataType if other is not None else None
            kind = noted(kind, inner) if isinstance(inner, StructType) else kind
        return named(field.name, kind, () if other is None else was(other))

    return StructType([one(f) for f in columns.fields])


def with_all_names(columns: StructType, stored: StructType) -> StructType:
    """Columns with the earlier names that they say themselves, and those that a table has noted."""
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
    """By column of a schema the names that it had before, out of a declaration's ``{old: new}``, in
    which one that had several has an entry for each.

    Raises:
        TopologyError: the new name is no column, or the old one is.
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
                f"{asset}: expected renamed to say by which names columns went before, as "
                f"{{'before': 'now'}}, where only the name of now is a column, got {old!r}: {new!r} "
                f"beside the columns {schema.names}; correct it, or leave out what is not true any more"
            )
        found[new] = (old, *found.get(new, ()))
    return found


def same_meaning(now: str, then: str, sides: Sequence[Names], own: Names) -> bool:
    """Whether two texts of an operator's meaning are the same but for names of columns.

    Args:
        now, then: SQL with names, as it is declared and as it was.
        sides: the earlier names of the columns of its inputs, the left one first.
        own: of its result.
    """
    if now == then:
        return True
    return re.fullmatch(_pattern(now, sides, own), then) is not None


def _pattern(text: str, sides: Sequence[Names], own: Names) -> str:
    """What a text could have been before, where its columns had other names."""
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
            # 'right.new' gives what 'right.old as new' gave.
            found.append(f"{either}(?: as {_quoted(name)})?")
        elif alias[1].strip("`") in before:
            # 'right.new as old' gives what 'right.old' gave.
            old = _quoted(alias[1].strip("`"))
            found.append(f"(?:{either} as {old}|{old})")
            i += 4
        else:
            found.append(either)
    return "".join(found)


def _quoted(name: str) -> str:
    return f"`?{re.escape(name)}`?"
