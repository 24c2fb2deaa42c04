"""Reads a text that is exactly one JSON object, with each value as the text in which it is written.

Spark's JSON reader changes numbers: 1.10 becomes 1.1 in a STRING, 1e400 Infinity, 200 becomes -56 in a
BYTE. Each number is therefore quoted before Spark parses the object, behind a mark that distinguishes
it from a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import uuid4

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    StringType,
    StructField,
    StructType,
)

from vt_dagster.sources.nested_values import any_of, read_row, texts_of
from vt_dagster.sources.value_reader import (
    FLOATS,
    INTEGERS,
    NAMED_UNITS,
    TIMES,
    Reading,
    of_number,
    of_text,
    of_unscaled,
    rarely,
)

_CORRUPT = "_corrupt"
_ALL, _END = f"_all_{uuid4().hex}", f"_end_{uuid4().hex}"
NUMBER = f"#{uuid4().hex[:12]}"
"""Random names that no text contains."""
PAYLOAD, SCHEMA = "payload", "schema"
SCHEMA_OF = "_schema"
_BARE = (*INTEGERS, *FLOATS, BooleanType)
"""Types that accept a number with or without quotes."""
DECIMAL = "org.apache.kafka.connect.data.Decimal"


class Parsed(NamedTuple):
    """A parsed text.

    Args:
        columns: intermediate columns to add first, in this order, by name. Each refers to those before
            it, so that a text is parsed once, however many columns refer to it.
        texts: a struct with the columns as texts, and Connect's ``schema``; null if the text is not one
            whole object with the expected names.
    """

    columns: dict[str, Column]
    texts: Column


def parse(
    text: Column,
    wanted: StructType,
    options: Mapping[str, str],
    into: str,
    alone: bool = False,
    bare_payload: bool = False,
) -> Parsed:
    """Parses a text as one JSON object of texts, and unwraps Connect's envelope.

    Spark reads only the first value of a text and ignores the rest. The text is therefore wrapped as
    the first element of an array with an end marker as the second. An object that has a field twice,
    none of the columns, or a name that differs only in case is invalid.

    Args:
        wanted: the fields.
        options: Spark's JSON options.
        into: prefix of the names of the columns.
        alone: whether a text may be the bare value of a single column instead of an object.
        bare_payload: whether an envelope may lack its schema.
    """
    by_itself = None
    if alone and len(wanted.fields) == 1:
        by_itself = ~F.rlike(text, F.lit(r"\A\s*\{"))
        only = F.concat(F.lit(f'{{"{wanted.names[0]}":'), text, F.lit("}"))
        text = F.when(by_itself, only).otherwise(text)
    one = StructType([*_asked(wanted).fields, StructField(_END, BooleanType())])
    schema = StructType([StructField(_ALL, ArrayType(one)), StructField(_CORRUPT, StringType())])
    whole = F.concat(F.lit(f'{{"{_ALL}":['), _marked(text, options), F.lit(f',{{"{_END}":true}}]}}'))
    options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    keys, found = f"{into}_keys", f"{into}_texts"
    columns = {into: F.from_json(whole, schema, options), keys: F.json_object_keys(text)}
    columns[found] = _texts(F.col(into), F.col(keys), wanted, bare_payload, by_itself)
    return Parsed(columns, F.col(found))


def _texts(
    parsed: Column, keys: Column, wanted: StructType, bare_payload: bool, by_itself: Column | None
) -> Column:
    found = parsed[_ALL]
    row, last = F.get(found, 0), F.get(found, 1)[_END]
    whole = parsed[_CORRUPT].isNull() & row.isNotNull() & last & (F.size(found) == 2)
    # ``json_object_keys`` returns null for JSON that only options allow, such as comments: then the
    # columns decide.
    unnamed = keys.isNull()
    # The fast path: most messages have exactly the columns, in order.
    same = F.coalesce(keys == F.array(*map(F.lit, wanted.names)), F.lit(False))
    whole = whole & (same | unnamed | (F.size(keys) == F.size(F.array_distinct(keys))))
    if by_itself is not None:
        whole = whole & (~by_itself | (~unnamed & (F.size(keys) == 1)))
    known = F.size(F.array_intersect(keys, F.array(*map(F.lit, wanted.names))))
    lowered = F.array(*[F.lit(n) for n in dict.fromkeys(n.lower() for n in wanted.names)])
    alike = F.size(F.array_intersect(F.transform(keys, F.lower), lowered))
    plain = F.struct(*[row[n].alias(n) for n in wanted.names], _no_schema().alias(SCHEMA_OF))
    some = any_of([row[n].isNotNull() for n in wanted.names])
    ours = F.when(unnamed, some).otherwise((known > 0) & (alike <= known))
    plain = F.when(whole & (same | ours), plain)
    if not _enveloped(wanted):
        return plain
    around = F.size(F.array_intersect(keys, F.array(F.lit(PAYLOAD), F.lit(SCHEMA))))
    both = F.array_contains(keys, PAYLOAD) if bare_payload else (around == 2)
    payload = _payload(row, wanted)
    some = any_of([payload[n].isNotNull() for n in wanted.names])
    inner = F.struct(*[payload[n].alias(n) for n in wanted.names], row[SCHEMA].alias(SCHEMA_OF))
    inside = ~same & both & (F.size(keys) == around)
    return F.when(inside, F.when(whole & some, inner)).otherwise(plain)


def read_object(
    parsed: Parsed,
    wanted: StructType,
    how: Reading,
    into: str,
    texts: Column | None = None,
    schema: Column | None = None,
) -> tuple[dict[str, Column], Column]:
    """Returns a parsed text as a row.

    Args:
        texts, schema: the row as texts, and Connect's schema of it; None = those of ``parsed``.

    Returns:
        the columns to add first, and the row: null if the text is invalid, or a value does not fit its
        column.
    """
    texts = parsed.texts if texts is None else texts
    schema = parsed.texts[SCHEMA_OF] if schema is None else schema
    columns, named = dict(parsed.columns), f"{into}_named"
    told = [f.name for f in wanted.fields if isinstance(f.dataType, (*TIMES, DecimalType))]
    if told and _enveloped(wanted):
        columns[named] = F.when(
            schema.isNotNull(), F.struct(*[_named(schema, name).alias(name) for name in told])
        )

    bare = {
        f.name: F.replace(texts[f.name], F.lit(NUMBER), F.lit(""))
        for f in wanted.fields
        if isinstance(f.dataType, _BARE)
    }
    plain = f"{into}_plain"
    fields = [bare.get(name, texts[name]).alias(name) for name in wanted.names]
    columns[plain] = F.when(texts.isNotNull(), F.struct(*fields))

    def leaf(text: Column, kind: DataType, path: tuple[str, ...]) -> Column:
        if len(path) == 1 and path[0] in bare:
            return of_text(text, kind, how)
        known = len(path) == 1 and path[0] in told and named in columns
        return value_of(text, kind, how, path, F.col(named)[path[0]] if known else None)

    return columns | read_row(F.col(plain), wanted, leaf, into), F.col(f"{into}_row")


def _named(schema: Column, name: str) -> Column:
    """Returns a field's logical type in Connect's schema, and the scale of a decimal."""
    field = F.get(F.filter(schema["fields"], lambda one: one["field"] == name), F.lit(0))
    return F.struct(field["name"].alias("name"), field["parameters"]["scale"].alias("scale"))


def value_of(
    text: Column, kind: DataType, how: Reading, path: tuple[str, ...] = (), field: Column | None = None
) -> Column:
    """Returns a marked text as a value of a type; null if it does not fit.

    Args:
        field: the field in Connect's schema, with the logical type of a number.
    """
    if isinstance(kind, StringType):
        marked = F.contains(text, F.lit(NUMBER))
        bare = F.regexp_replace(text, f'"?{NUMBER}([^"]*)"?', "$1")
        return F.when(marked, bare).otherwise(text)
    number = F.replace(text, F.lit(NUMBER), F.lit(""))
    if isinstance(kind, DecimalType):
        plain = of_text(number, kind, how)
        told = None if field is None else field["name"] == DECIMAL
        unscaled = of_unscaled(text, kind.scale, kind) if how.unscaled else None
        if unscaled is not None:
            plain = F.when(text.startswith(NUMBER), plain).otherwise(unscaled)
        if field is None or told is None:
            return plain
        by_name = rarely(text, lambda odd: of_unscaled(odd, field["scale"], kind))
        return F.when(told, by_name).otherwise(plain)
    if not isinstance(kind, (*TIMES, BinaryType)):
        return of_text(number, kind, how)
    counted = rarely(number, lambda odd: _counted(odd, kind, how.unit(path), field))
    return F.when(text.startswith(NUMBER), counted).otherwise(of_text(text, kind, how, path))


def _counted(number: Column, kind: DataType, unit: str | None, field: Column | None) -> Column:
    """Returns a number as a value of a time or BINARY column."""
    counted = of_number(number, kind, unit)
    if field is None or not isinstance(kind, TIMES):
        return counted
    names = F.create_map(*[F.lit(part) for pair in NAMED_UNITS.items() for part in pair])
    named = F.try_element_at(names, field["name"])
    return F.when(named.isNotNull(), of_number(number, kind, named)).otherwise(counted)


def _enveloped(wanted: StructType) -> bool:
    return not {PAYLOAD, SCHEMA} & {*wanted.names}


def _asked(wanted: StructType) -> StructType:
    own = texts_of(wanted)
    assert isinstance(own, StructType)
    if not _enveloped(wanted):
        return own
    inner = own if len(own.fields) > 1 else StringType()
    return StructType([*own.fields, StructField(PAYLOAD, inner), StructField(SCHEMA, _connect(2))])


def _no_schema() -> Column:
    return F.lit(None).cast(_connect(2))


def _connect(depth: int) -> StructType:
    """Returns the type of the schema in Connect's envelope, with ``depth`` levels of fields."""
    scale = StructType([StructField("scale", StringType())])
    fields = [StructField(n, StringType()) for n in ("field", "name")]
    fields.append(StructField("parameters", scale))
    if depth:
        fields.append(StructField("fields", ArrayType(_connect(depth - 1))))
    return StructType(fields)


def _payload(row: Column, wanted: StructType) -> Column:
    """Returns the content of Connect's envelope; for a single column it may be the value itself."""
    payload = row[PAYLOAD]
    if len(wanted.fields) > 1:
        return payload
    own, name = texts_of(wanted), wanted.names[0]
    inner = F.when(payload.startswith("{"), F.from_json(payload, own))
    if isinstance(wanted.fields[0].dataType, ArrayType | StructType):
        return inner
    value = F.when(payload.startswith("{"), inner[name]).otherwise(payload)
    return F.struct(value.alias(name))


def _marked(text: Column, options: Mapping[str, str]) -> Column:
    """Returns a JSON text with its numbers in quotes, behind a mark; invalid JSON remains invalid."""
    told = {k.lower(): v.lower() == "true" for k, v in options.items()}
    skipped = [r"[\s{}\[\]:,]++", r'"(?:[^"\\]++|\\.)*+"', r"(?:true|false|null)(?![\w$])"]
    number = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
    if told.get("allowsinglequotes", True):
        skipped.append(r"'(?:[^'\\]++|\\.)*+'")
    if told.get("allownumericleadingzeros"):
        number = r"-?[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
    if told.get("allownonnumericnumbers", True):
        number = rf"(?:{number}|NaN|[+-]?INF|[+-]?Infinity)"
    if told.get("allowcomments"):
        skipped += [r"/\*.*?\*/", r"//[^\n]*+"]
    if told.get("allowunquotedfieldnames"):
        skipped.append(r"[\w$]++(?=\s*+:)")
    pattern = rf"(?s)\G((?:{'|'.join(skipped)})*+)({number})(?=[\s,/\]}}]|\z)"
    return F.regexp_replace(text, pattern, f'$1"{NUMBER}$2"')
