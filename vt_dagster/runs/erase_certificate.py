"""The certificate of an erase: tables searched and copies left elsewhere, without values of the key."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field, PrivateAttr
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from vt_dagster.columns import OLD
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.arrow_reader import asset_names
from vt_dagster.storage.erase_files import Key

FOLDER = "erased.certificates"
"""Folder in a warehouse; no asset can have this name."""


class Searched(BaseModel):
    """The result for one table, summed over all attempts of an interrupted erase.

    Args:
        rows: number of rows searched; ``erased``: rows removed or turned into tombstones; ``old``: rows
            whose ``old`` was erased.
        version: the table's version after the erase, if it was rewritten.
        files: number of rewritten files that had the key; None = unknown in a dry run.
    """

    rows: int = 0
    erased: int = 0
    old: int = 0
    version: int | None = None
    files: int | None = 0

    def __init__(
        self,
        rows: int = 0,
        erased: int = 0,
        old: int = 0,
        version: int | None = None,
        files: int | None = 0,
    ) -> None:
        super().__init__(rows=rows, erased=erased, old=old, version=version, files=files)

    def __str__(self) -> str:
        files = "unknown number of files" if self.files is None else f"{self.files} files"
        return f"{self.erased} of {self.rows} rows, {self.old} old rows, {files}"


class Certificate(BaseModel):
    """The document of one erase."""

    id: str
    asset: str
    reason: str
    salt: str
    key_sha256: str
    """SHA-256 of the salt and the JSON of ``[asset, key, where]``."""
    started: str
    finished: str | None = None
    """None = the erase was interrupted (run it again), or it was a dry run."""
    searched: dict[str, Searched] = Field(default_factory=dict)
    """By table of the warehouse (``prices/log``), or export."""
    files_removed: int = 0
    kept: dict[str, str] = Field(default_factory=dict)
    """Derived assets that were not searched, with the reason."""
    elsewhere: list[str] = Field(default_factory=list)
    """Other assets of the warehouse that still have the key's value."""
    unreachable: list[str] = Field(default_factory=list)
    """Places of possible copies that no erase reaches, and how to remove these: landing files, topics,
    Dagster's event storage, Delta's statistics."""
    statistics: dict[str, int] = Field(default_factory=dict)
    """By table: how many files in its ``_delta_log`` still have the key as minimum or maximum in their
    statistics after the erase."""
    waiting: dict[str, int] = Field(default_factory=dict)
    """During the erase: by join, how many buffered records the erase removes."""
    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """The file of the certificate; empty for a dry run."""
        return self._path

    def add(self, table: str, found: Searched) -> None:
        """Adds the result for a table to that of earlier attempts."""
        before = self.searched.get(table, Searched())
        sums: dict[str, int] = {"erased": before.erased + found.erased, "old": before.old + found.old}
        if found.files is not None:
            sums["files"] = (before.files or 0) + found.files
        self.searched[table] = found.model_copy(update=sums)
        self.save()

    def finish(self) -> None:
        """Marks the erase as finished."""
        self.finished = _now()
        self.save()

    def save(self) -> None:
        """Writes the document atomically; a dry run writes nothing."""
        if not self._path:
            return
        fs, local = delta.filesystem(self._path)
        with parquet.writing(self._path):
            fs.makedirs(posixpath.dirname(local), exist_ok=True)
            fs.pipe_file(f"{local}.part", self.model_dump_json(indent=2).encode())
            fs.mv(f"{local}.part", local)


def begun(warehouse: str, asset: str, asked: Sequence[Any], reason: str) -> Certificate:
    """Returns the certificate of an interrupted attempt at the same erase, or a new one."""
    folder = posixpath.join(warehouse, FOLDER)
    fs, local = delta.filesystem(folder)
    names = fs.ls(local, detail=False) if fs.exists(local) else []
    for name in sorted(map(posixpath.basename, names)):
        if not name.endswith(".json"):
            continue
        found = Certificate.model_validate_json(fs.cat_file(posixpath.join(local, name)))
        if found.finished is None and found.key_sha256 == _hash(found.salt, asked):
            found._path = posixpath.join(folder, name)
            return found
    made = unwritten(asset, asked, reason)
    made._path = posixpath.join(folder, f"{made.started[:19].replace(':', '')}-{made.id}.json")
    made.save()
    return made


def unwritten(asset: str, asked: Sequence[Any], reason: str) -> Certificate:
    """Returns a new certificate that is not written to a file, for a dry run."""
    salt = uuid4().hex
    return Certificate(
        id=uuid4().hex,
        asset=asset,
        reason=reason,
        salt=salt,
        key_sha256=_hash(salt, asked),
        started=_now(),
    )


def _hash(salt: str, asked: Sequence[Any]) -> str:
    return hashlib.sha256((salt + json.dumps(asked, default=str)).encode()).hexdigest()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def elsewhere(
    warehouse: str, key: Key, spark: SparkSession, left: Mapping[str, DataFrame] = {}
) -> list[str]:
    """Returns the logs of a warehouse that still have the key in columns with the key's names; a key of
    one text column is searched in all text columns.

    Args:
        left: for a dry run, by asset: the log rows that the erase would leave.

    Plan: one pass over these columns of each log.
    """
    found: list[str] = []
    for name in asset_names(warehouse):
        path = posixpath.join(warehouse, name, "log")
        rows = left.get(name)
        columns = _suspects(parquet.schema(path) if rows is None else rows.schema, key)
        if not columns:
            continue
        rows = parquet.read(spark, path) if rows is None else rows
        counted = [F.count_if(hit).alias(told) for told, hit in columns.items()]
        counts = rows.agg(*counted).collect()[0]
        found += [
            f"{name}: {counts[told]} rows have the key in {told}, which is not derived from the erased "
            f"asset: erase it there too (vt-dagster erase … {name}), or replay and swap {name}"
            for told in columns
            if counts[told]
        ]
    return found


def _suspects(columns: StructType, key: Key) -> dict[str, Column]:
    """Returns, by column, the condition that a row has the key there."""
    types = {f.name: f.dataType for f in columns.fields}
    if key.values is not None and [*map(type, key.values)] == [str]:
        inside = types.get(OLD)
        texts = [f"`{name}`" for name, kind in types.items() if isinstance(kind, StringType)]
        if isinstance(inside, StructType):
            texts += [f"{OLD}.`{f.name}`" for f in inside if isinstance(f.dataType, StringType)]
        return {c.replace("`", ""): F.col(c).eqNullSafe(F.lit(key.values[0])) for c in texts}
    if not {*key.types} <= {*types}:
        return {}
    return {", ".join(key.types): key.condition()}
