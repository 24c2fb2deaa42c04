"""Protobuf messages as JSON text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from vt_dagster.errors import SourceError


def message_class_of(descriptors: bytes, name: str) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    try:
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            pool.Add(file)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except Exception as error:  # KeyError, DecodeError, TypeError: as the library pleases
        raise SourceError(
            f"Protobuf: expected the message {name!r} among the descriptors, got: {error}; give its "
            "full name, package.Name, and make the file with --include_imports"
        ) from None


def protobuf_reader(descriptors: bytes, name: str) -> Any:
    """A function of a column of messages: their JSON; null where a message cannot be read."""

    import pandas as pd

    def read(batches: Any) -> Any:
        # Self-contained: workers need protobuf, not this package.
        import base64
        import json

        import pandas as pd
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            pool.Add(file)
        message_class = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))

        def one(field: Any, value: Any) -> Any:
            if field.message_type is not None:
                if field.message_type.full_name == "google.protobuf.Timestamp":
                    return value.ToJsonString()
                return plain(value)
            if field.enum_type is not None:
                known = field.enum_type.values_by_number.get(value)
                return value if known is None else known.name
            return base64.b64encode(value).decode() if isinstance(value, bytes) else value

        def plain(message: Any) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for part in message.DESCRIPTOR.fields:
                value = getattr(message, part.name)
                kind = part.message_type
                if kind is not None and kind.GetOptions().map_entry:
                    of = kind.fields_by_name["value"]
                    found[part.name] = {str(k): one(of, value[k]) for k in value}
                elif part.is_repeated:
                    found[part.name] = [one(part, v) for v in value]
                elif not part.has_presence or message.HasField(part.name):
                    found[part.name] = one(part, value)
            return found

        def text(raw: bytes | None) -> str | None:
            try:
                return None if raw is None else json.dumps(plain(message_class.FromString(bytes(raw))))
            except Exception:  # DecodeError and what upb raises for bad UTF-8
                return None

        for batch in batches:
            yield pd.Series([text(raw) for raw in batch], dtype="object")

    series = Iterator[pd.Series]
    read.__annotations__ = {"batches": series, "return": series}  # Spark takes its kind from them
    return F.pandas_udf(read, StringType())  # pyright: ignore[reportCallIssue, reportArgumentType]
