"""What an erase tells of itself: what was searched, what is left elsewhere, and no value of the key."""

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
"""Of a warehouse: no asset has such a name."""


class Searched(BaseModel):
    """What was found in one table: over all tries, where one was killed.

    Args:
        rows: that were looked at; ``erased``: that were removed, or emptied of all but another key;
            ``old``: whose old row was.
        version: of the table after it, where it was written anew.
        files: that had it, and were written anew; None = not known before it takes place.
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
        files = "files not known" if self.files is None else f"{self.files} files"
        return f"{self.erased} of {self.rows} rows, {self.old} old rows, {files}"


class Certificate(BaseModel):
    """The document of one erase."""

    id: str
    asset: str
    reason: str
    salt: str
    key_sha256: str
    """Of the salt and the JSON of ``[asset, key, where]``."""
    started: str
    finished: str | None = None
    """None = it was interrupted: run it again; or it was a dry run."""
    searched: dict[str, Searched] = Field(default_factory=dict)
    """By table of the warehouse (``prices/log``), or export."""
    files_removed: int = 0
    kept: dict[str, str] = Field(default_factory=dict)
    """What is derived from the asset and was not searched, and why."""
    elsewhere: list[str] = Field(default_factory=list)
    """Where the key's value still is in other assets of the warehouse."""
    unreachable: list[str] = Field(default_factory=list)
    """Where copies may be that no erase reaches, and what helps there: landing files, topics, Dagster's
    event storage, Delta's statistics."""
    statistics: dict[str, int] = Field(default_factory=dict)
    """By table: in how many files' smallest or largest values, of all that its ``_delta_log`` has after
    the erase, the key still is."""
    waiting: dict[str, int] = Field(default_factory=dict)
    """While it goes on: how many of the records that a join holds back are about to go."""
    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """Where it lies; of a dry run empty."""
        return self._path

    def add(self, table: str, found: Searched) -> None:
        """Notes what was found in a table, beside what an earlier try found."""
        before = self.searched.get(table, Searched())
        sums: dict[str, int] = {"erased": before.erased + found.erased, "old": before.old + found.old}
        if found.files is not None:
            sums["files"] = (before.files or 0) + found.files
        self.searched[table] = found.model_copy(update=sums)
        self.save()

    def finish(self) -> None:
        """Says that it has come to its end."""
        self.finished = _now()
        self.save()

    def save(self) -> None:
        """Writes the document, as a whole; not that of a dry run."""
        if not self._path:
            return
        fs, local = delta.filesystem(self._path)
        with parquet.writing(self._path):
            fs.makedirs(posixpath.dirname(local), exist_ok=True)
            fs.pipe_file(f"{local}.part", self.model_dump_json(indent=2).encode())
            fs.mv(f"{local}.part", local)


def begun(warehouse: str, asset: str, asked: Sequence[Any], reason: str) -> Certificate:
    """The certificate of an erase: the one that an interrupted try has begun, or a new one."""
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
    """A new certificate, which lies nowhere: what a dry run tells."""
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
    """Where the logs of a warehouse still have the key: in columns of its names; of a single text, in
    any column.

    Args:
        left: before an erase, by asset: what it leaves of the log.

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
            f"{name}: {counts[told]} rows have it in {told}, which is not derived from what was "
            f"erased: erase it there too (vt-dagster erase … {name}), or make that anew"
            for told in columns
            if counts[told]
        ]
    return found


def _suspects(columns: StructType, key: Key) -> dict[str, Column]:
    """By column, whether a row has the key there."""
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
