"""Avro records as columns: fields match by name at any depth; each value is exact or null."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructType,
)

from vt_dagster.errors import SourceError
from vt_dagster.sources.value_reader import (
    FLOATS,
    INTEGERS,
    NAMED_UNITS,
    TIME_OF_DAY,
    TIMES,
    VARIABLE_DECIMAL,
    Reading,
    any_of,
    in_other_case,
    map_of,
    of_boolean,
    of_bytes,
    of_decimal,
    of_double,
    of_long,
    of_text,
    of_unscaled,
    other_case,
    text_of_unscaled,
)
from vt_dagster.topology.schema import was

READ = "_vt_read"
"""Field of a row: true if the message is readable."""
_ROW, _END = "_vt_row", "_vt_end"
_MARK = uuid4().bytes
"""What follows a message: 16 bytes that no message ends with."""
_UNITS = {
    "date": "days",
    "timestamp-millis": "millis",
    "timestamp-micros": "micros",
    "timestamp-nanos": "nanos",
    "local-timestamp-millis": "millis",
    "local-timestamp-micros": "micros",
    "local-timestamp-nanos": "nanos",
    **dict.fromkeys(("time-millis", "time-micros"), TIME_OF_DAY),
}
_MOST_DIGITS = 38
"""Maximum digits of a DECIMAL in Spark. Kafka Connect's converter declares 64, unless the connector
declares less."""
_NUMBERS = (*INTEGERS, *FLOATS, DecimalType, StringType)
_FITTING = {
    **dict.fromkeys(("int", "long", "float", "double", "decimal", "unscaled", "variable"), _NUMBERS),
    "boolean": (BooleanType, StringType),
    **dict.fromkeys(("bytes", "fixed"), (BinaryType, StringType)),
    "encoded": (BinaryType,),
}
"""Column types that values of an Avro type may fit into; a string may fit into any."""
_ENCODED = ("decimal", "big-decimal", "duration", "uuid")
"""Logical types whose bytes are no text."""
_LEAVES = ("string", "enum", "null", "int", "long", "float", "double", "boolean", "bytes", "fixed")
_RECORDS = ("record", "variable")
_DEEP = ("record", "recursive", "array", "map")
_MEMBER = re.compile(r"member\d+")


class Node(NamedTuple):
    """A type in an Avro schema.

    Args:
        type: the Avro type: ``record``, ``long``, …; ``decimal`` for that logical type; ``unscaled``
            for one of more digits than Spark reads; ``variable`` for Debezium's record of a decimal and
            its scale; ``encoded`` for bytes of another logical type.
        fields: the fields of a record.
        items: the element type of an array, or the value type of a map.
        members: the members of a union, without null.
        unit: the unit of a number that is a time.
        scale: the digits after the point of an ``unscaled`` number.
    """

    type: str
    fields: Mapping[str, Node] = {}
    items: Node | None = None
    members: Sequence[Node] = ()
    unit: str | None = None
    scale: int = 0


def node_of(schema: str) -> Node:
    """Returns the root type of a schema.

    Raises:
        SourceError: the text is no schema.
    """
    try:
        return _node(json.loads(schema), {}, "", ())
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"Avro: expected a schema in JSON, got {schema[:200]!r}: {type(error).__name__} {error}; "
            "correct it"
        ) from None


def _node(schema: Any, known: dict[str, Any], space: str, inside: tuple[str, ...]) -> Node:
    if isinstance(schema, list):
        members = [_node(one, known, space, inside) for one in schema if one not in ("null", _NULL)]
        kinds = {one.type for one in members}
        if len(members) == 1:
            return members[0]
        for both in ({"int", "long"}, {"float", "double"}):
            if kinds == both and len(members) == 2:  # Spark reads them as the longer one
                return next(one for one in members if one.type in ("long", "double"))
        return Node("union", members=members)
    if isinstance(schema, str):
        name = schema if schema in known else f"{space}.{schema}"
        if name not in known:
            return Node(schema)
        schema, space = known[name]
        if name in inside:
            return Node("recursive")
        inside = (*inside, name)
    kind = schema["type"]
    if not isinstance(kind, str):
        return _node(kind, known, space, inside)
    if kind in ("record", "error", "enum", "fixed"):
        space = schema.get("namespace", schema["name"].rpartition(".")[0] or space)
        name = f"{space}.{schema['name'].rpartition('.')[2]}"
        known[name] = known[name.lstrip(".")] = (schema, space)
        inside = (*inside, name, name.lstrip("."))
    if kind in ("record", "error"):
        fields = {one["name"]: _node(one["type"], known, space, inside) for one in schema["fields"]}
        is_number = name == VARIABLE_DECIMAL and {*fields} == {"scale", "value"}
        return Node("variable" if is_number else "record", fields)
    if kind in ("array", "map"):
        items = schema["items" if kind == "array" else "values"]
        return Node(kind, items=_node(items, known, space, inside))
    if _is_decimal(schema):
        return Node("decimal")
    if kind in ("bytes", "fixed") and schema.get("logicalType") in _ENCODED:
        # The bytes of such a value may be valid UTF-8 by chance.
        scale = schema.get("scale", 0)
        is_number = schema["logicalType"] == "decimal" and 0 <= scale <= _MOST_DIGITS
        return Node("unscaled", scale=scale) if is_number else Node("encoded")
    if kind in _LEAVES:
        of_connect = NAMED_UNITS.get(schema.get("connect.name", ""))
        return Node(kind, unit=_UNITS.get(schema.get("logicalType", ""), of_connect))
    return _node(kind, known, space, inside)


_NULL = {"type": "null"}


def with_types(schema: str, types: Mapping[str, str]) -> str:
    """Returns a schema in which each named type is defined where it is first used.

    Args:
        types: schemas of types that it names, and that they name, by full name.
    """
    left = {name: json.loads(text) for name, text in types.items()}

    def whole(part: Any, space: str) -> Any:
        if isinstance(part, list):
            return [whole(one, space) for one in part]
        if isinstance(part, str):
            name = next((n for n in (f"{space}.{part}", part) if n in left), None)
            return part if name is None else whole(_in_no_space(left.pop(name)), "")
        space = part.get("name", "").rpartition(".")[0] or part.get("namespace", space)
        found = {k: whole(part[k], space) for k in ("items", "values") if k in part}
        if not isinstance(part["type"], str):
            found["type"] = whole(part["type"], space)
        if "fields" in part:
            found["fields"] = [{**one, "type": whole(one["type"], space)} for one in part["fields"]]
        return {**part, **found}

    return json.dumps(whole(json.loads(schema), ""))


def _in_no_space(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a type that does not take the namespace of the record around it."""
    return schema if "." in schema["name"] else {"namespace": "", **schema}


def _is_decimal(schema: Mapping[str, Any]) -> bool:
    return schema.get("logicalType") == "decimal" and schema.get("precision", 99) <= _MOST_DIGITS


def _plain(schema: Any) -> Any:
    """Returns a schema without logical types except decimals: Spark's conversion of times overflows."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    keep = _is_decimal(schema)
    deep = ("type", "items", "values", "fields")
    return {k: _plain(v) if k in deep else v for k, v in schema.items() if keep or k != "logicalType"}


def read_avro(message: Column, schema: str) -> Column:
    """Returns an Avro message as a struct: ``_ROW`` with all its fields, and the bytes that follow it.

    Spark returns nulls for an unreadable message, but a readable one may also have nulls only. Spark
    also ignores bytes that follow a message: from a message of another schema, for example in
    Confluent's framing, it reads values that nobody wrote. Therefore a mark is appended to the message,
    and to the schema as its last field. If the message does not end where its schema ends, that field
    has other bytes, or null.
    """
    from pyspark.sql.avro.functions import from_avro

    end = {"type": "fixed", "name": _END, "size": len(_MARK)}
    fields = [{"name": _ROW, "type": _plain(json.loads(schema))}, {"name": _END, "type": end}]
    marked = {"type": "record", "name": "_vt_message", "fields": fields}
    # Spark drops the fields of a record that have its type; by default it reads no such record.
    options = {"mode": "PERMISSIVE", "recursiveFieldMaxDepth": "1"}
    return from_avro(F.concat(message, F.lit(_MARK)), json.dumps(marked), options)


def row_of(
    value: Column, schema: str, wanted: StructType, how: Reading, newest: str = "null"
) -> Column:
    """Returns the wanted fields of a result of ``read_avro``, and ``READ``: null if it is unreadable.

    Args:
        newest: the newest schema, with defaults of fields that ``schema`` lacks, and aliases.
    """
    node, read = node_of(schema), F.when(value[_END] == F.lit(_MARK), True)
    value = value[_ROW]
    if node.type != "record":
        if len(wanted.fields) != 1:
            raise SourceError(f"Avro: {misfits(schema, wanted, how)[0]}; give another schema")
        only = wanted.fields[0]
        found, misfit = _fitted(value, node, only.dataType, how, (only.name,))
        there = F.when(~misfit & value.isNotNull(), read)
        return F.struct(found.alias(only.name), there.alias(READ))
    written = _written(json.loads(schema), wanted, newest)
    defaults, fields = _defaults(newest), {} if newest == "null" else node_of(newest).fields
    columns, lost = list[Column](), list[Column]()
    for f, name in zip(wanted.fields, written, strict=True):
        if name in node.fields:
            found, misfit = _fitted(value[name], node.fields[name], f.dataType, how, (f.name,))
            lost.append(misfit)
        elif not node.fields.keys() & {*was(f)} and f.name in defaults:
            found = _default(defaults[f.name], fields[f.name], f.dataType, how, (f.name,))
        else:
            found = F.lit(None).cast(f.dataType)
            lost.append(F.lit(other_case(name, node.fields, wanted) is not None))
        columns.append(found.alias(f.name))
    if newest != "null" and not {*written} & node.fields.keys():
        lost.append(F.lit(True))  # with a single schema, ``misfits`` fails when definitions load
    return F.struct(*columns, F.when(~any_of(lost), read).alias(READ))


def misfits(schema: str, wanted: StructType, how: Reading) -> list[str]:
    """Returns descriptions of columns that no message of a schema can fill. Does not use Spark."""
    node = node_of(schema)
    if node.type != "record":
        if len(wanted.fields) != 1:
            return [f"the schema is {schema}, expected a record with the fields {wanted.names}"]
        only = wanted.fields[0]
        return list(_never(node, only.dataType, how, (only.name,)))
    written = _written(json.loads(schema), wanted, "null")
    if not {*written} & node.fields.keys():
        return [f"the schema has the fields {list(node.fields)}, none of the columns {wanted.names}"]
    together = zip(wanted.fields, written, strict=True)
    found = list[str]()
    for f, name in together:
        if name in node.fields:
            found += _never(node.fields[name], f.dataType, how, (f.name,))
        elif other := other_case(name, node.fields, wanted):
            found.append(in_other_case(name, other))
    return found


def _never(node: Node, kind: DataType, how: Reading, path: tuple[str, ...]) -> Iterator[str]:
    """Yields descriptions of the parts of a type that no value of an Avro type fits into."""
    if node.type in _RECORDS and isinstance(kind, StructType):
        for f in kind.fields:
            if f.name in node.fields:
                yield from _never(node.fields[f.name], f.dataType, how, (*path, f.name))
            elif other := other_case(f.name, node.fields, kind):
                yield in_other_case(".".join((*path, f.name)), other)
    elif node.items is not None and isinstance(kind, ArrayType | MapType):
        inner = kind.elementType if isinstance(kind, ArrayType) else kind.valueType
        if (node.type == "array") == isinstance(kind, ArrayType):
            yield from _never(node.items, inner, how, path)
        else:
            yield _misfit(node, kind, path)
    elif node.type == "union" and not _by_member(kind):
        if not any(not list(_never(one, kind, how, path)) for one in node.members):
            yield _misfit(node, kind, path)
    elif node.type not in ("null", "union") and not _may_fit(node, kind, how, path):
        yield _misfit(node, kind, path)


def _may_fit(node: Node, kind: DataType, how: Reading, path: tuple[str, ...]) -> bool:
    if isinstance(kind, StructType | ArrayType | MapType) or node.type in _DEEP:
        return False
    if node.type in ("int", "long") and isinstance(kind, TIMES):
        return (node.unit or how.unit(path)) not in (None, TIME_OF_DAY)
    return isinstance(kind, _FITTING.get(node.type, (DataType,)))


_NAMES = {**dict.fromkeys(("unscaled", "variable"), "decimal"), "encoded": "bytes of a logical type"}


def _misfit(node: Node, kind: DataType, path: Sequence[str]) -> str:
    more = ""
    if node.type in ("int", "long") and isinstance(kind, TIMES):
        more = " without a logical type: set its unit with timestamps"
        more = " (a time of day has no date)" if node.unit == TIME_OF_DAY else more
    name = " or ".join(one.type for one in node.members) or _NAMES.get(node.type, node.type)
    return f"{'.'.join(path)} is {name} in the schema, expected {kind.simpleString()}{more}"


def _fitted(
    value: Column, node: Node, kind: DataType, how: Reading, path: tuple[str, ...]
) -> tuple[Column, Column]:
    """Returns a value as a type, and whether it does not fit (never null)."""
    if node.type in _RECORDS and isinstance(kind, StructType):
        return _fitted_record(value, node, kind, how, path)
    if node.type == "array" and isinstance(kind, ArrayType):
        items, element = node.items, kind.elementType
        assert items is not None
        bad = F.exists(value, lambda one: _fitted(one, items, element, how, path)[1])
        found = F.transform(value, lambda one: _fitted(one, items, element, how, path)[0])
        return found, F.coalesce(bad, F.lit(False))
    if node.type == "map" and isinstance(kind, MapType):
        of_keys, of_values = ArrayType(kind.keyType), ArrayType(kind.valueType)
        texts, items = Node("array", items=Node("string")), Node("array", items=node.items)
        keys = _fitted(F.map_keys(value), texts, of_keys, how, path)
        return map_of(value, keys, _fitted(F.map_values(value), items, of_values, how, path))
    if node.type == "union":
        return _fitted_union(value, node, kind, how, path)
    if not _may_fit(node, kind, how, path):
        return F.lit(None).cast(kind), value.isNotNull()
    found = _leaf(value, node, kind, how, path)
    return found, value.isNotNull() & found.isNull()


def _leaf(value: Column, node: Node, kind: DataType, how: Reading, path: tuple[str, ...]) -> Column:
    if node.type in ("int", "long"):
        return of_long(value, kind, node.unit or how.unit(path))
    if node.type == "float" and isinstance(kind, StringType):
        return value.cast("string")  # the shortest text of a FLOAT, not of a DOUBLE
    if node.type in ("float", "double"):
        return of_double(value, kind)
    if node.type == "unscaled":
        number = DecimalType(_MOST_DIGITS, node.scale)
        return of_decimal(of_unscaled(F.base64(value), node.scale, number), kind)
    if node.type == "variable":
        text = text_of_unscaled(F.base64(value["value"]), value["scale"].cast("string"))
        return of_text(text, kind)
    of_binary = dict.fromkeys(("bytes", "fixed", "encoded"), of_bytes)
    readers = {"decimal": of_decimal, "boolean": of_boolean, **of_binary}
    if node.type in readers:
        return readers[node.type](value, kind)
    text = value.cast("string")
    return of_text(F.when(F.is_valid_utf8(text), text), kind, how, path)


def _fitted_record(
    value: Column, node: Node, kind: StructType, how: Reading, path: tuple[str, ...]
) -> tuple[Column, Column]:
    columns, bad = list[Column](), list[Column]()
    for f in kind.fields:
        if f.name in node.fields:
            inner = node.fields[f.name]
            found, misfit = _fitted(value[f.name], inner, f.dataType, how, (*path, f.name))
            bad.append(misfit)
        else:
            found = F.lit(None).cast(f.dataType)
            bad.append(value.isNotNull() & F.lit(other_case(f.name, node.fields, kind) is not None))
        columns.append(found.alias(f.name))
    return F.when(value.isNotNull(), F.struct(*columns)), any_of(bad)


def _fitted_union(
    value: Column, node: Node, kind: DataType, how: Reading, path: tuple[str, ...]
) -> tuple[Column, Column]:
    """Returns the present member of a union, which Spark reads as a struct with a field per member."""
    members = [
        (value[f"member{i}"], _fitted(value[f"member{i}"], one, _of_member(kind, i), how, path))
        for i, one in enumerate(node.members)
        if not _by_member(kind) or (isinstance(kind, StructType) and f"member{i}" in kind.names)
    ]
    if isinstance(kind, StructType) and _by_member(kind):
        names = [f.name for f in kind.fields]
        fields = [found.alias(name) for name, (_, (found, _)) in zip(names, members, strict=True)]
        return F.when(value.isNotNull(), F.struct(*fields)), any_of([bad for _, (_, bad) in members])
    found = F.coalesce(*[found for _, (found, _) in members])
    return found, any_of([bad for _, (_, bad) in members])


def _by_member(kind: DataType) -> bool:
    return isinstance(kind, StructType) and all(_MEMBER.fullmatch(n) for n in kind.names)


def _of_member(kind: DataType, place: int) -> DataType:
    if isinstance(kind, StructType) and _by_member(kind):
        return kind[f"member{place}"].dataType
    return kind


def _written(declared: Any, wanted: StructType, newest: str) -> list[str]:
    """Returns the columns' names in a record's schema."""
    names = {one["name"] for one in declared["fields"]}
    every = (*_fields(declared), *_fields(json.loads(newest)))
    groups = [{one["name"], *one["aliases"]} for one in every if one.get("aliases")]
    return [_written_as(f.name, names, groups) for f in wanted.fields]


def _fields(declared: Any) -> list[dict[str, Any]]:
    return declared["fields"] if _is_record(declared) else []


def _written_as(column: str, names: set[str], groups: Sequence[set[str]]) -> str:
    """Returns a column's name in a record's schema: its own, or an alias."""
    if column in names:
        return column
    found = {n for group in groups if column in group for n in group & names}
    return min(found, default=column)


def _defaults(schema: str) -> dict[str, Any]:
    """Returns the defaults of a record's fields that are strings, numbers or booleans."""
    fields = _fields(json.loads(schema))
    return {one["name"]: d for one in fields if isinstance(d := one.get("default"), str | int | float)}


def _default(
    value: str | int | float, node: Node, kind: DataType, how: Reading, path: tuple[str, ...]
) -> Column:
    """Returns a field's default in JSON as a value of a type; null if it does not fit."""
    none = F.lit(None).cast(kind)
    if not _may_fit(node, kind, how, path):
        return none
    if isinstance(value, bool):
        return of_boolean(F.lit(value), kind)
    if isinstance(value, str):
        # A default of bytes is a text with a character for each byte; that of a decimal is no number.
        known = node.type in ("string", "enum", "union") or (node.type in _BYTES and value.isascii())
        return of_text(F.lit(value), kind, Reading(base64=False)) if known else none
    if isinstance(value, int):
        return of_long(F.lit(value).cast("bigint"), kind, node.unit or how.unit(path))
    return of_double(F.lit(value), kind)


_BYTES = ("bytes", "fixed")


def _is_record(kind: Any) -> bool:
    return isinstance(kind, dict) and kind.get("type") == "record"
