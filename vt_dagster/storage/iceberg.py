"""Commits files that Spark has written to Iceberg tables: PyIceberg does it, without Spark.

A commit is one transaction: a snapshot that adds the run's files, and removes all others if the table
is overwritten; the schema; and our document. The document is a property of the table: after a
compaction, ``expire_snapshots`` may remove the snapshot of our last commit.

Spark writes no field ids: the table has a mapping of column names (``schema.name-mapping.default``).
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deltalake.transaction import AddAction
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    DateType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.core.log_columns import arrow_schema
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import parquet
from vt_dagster.storage.delta import (
    MARK,
    location,
    names_in,
    require_format,
    require_written,
    with_format,
)
from vt_dagster.topology.schema import nullable

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table, Transaction

DOCUMENT = f"{MARK}.commit"
"""The property of a table that has our last document."""
ASSET, BATCH, ATTEMPT = f"{MARK}.asset", f"{MARK}.batch", f"{MARK}.attempt"
"""Keys in the summary of each snapshot that this module commits."""
NAME = re.compile(r"\w+(\.\w+)+")
CATALOG = re.compile(r"[a-zA-Z][\w-]+")
_REFERENCE = re.compile(rf"({CATALOG.pattern}):({NAME.pattern})")
_OWN_FOLDER = re.compile(r"\d+-[0-9a-f]{32}")
_PROPERTIES = {
    # A retry inside PyIceberg would append rows that another run has appended: see ``write``.
    "commit.retry.num-retries": "0",
    # Each commit writes the table's metadata anew: keep the last hundred files, Iceberg's default.
    "write.metadata.delete-after-commit.enabled": "true",
}
_ANEW = "drop the table with its files (purge_table of PyIceberg): the next run creates it again"
_TIMES = (DateType, TimestampType, TimestampNTZType)


def is_installed() -> bool:
    """Returns whether PyIceberg is installed, without importing it."""
    return find_spec("pyiceberg") is not None


class IcebergTable:
    """An Iceberg table that one asset writes.

    Args:
        asset: name of the only writer.
        catalog: name of the catalog in PyIceberg's configuration.
        name: ``schema.table`` in the catalog.
        place: absolute path or URL of the directory with the table's files.
    """

    def __init__(self, asset: str, catalog: str, name: str, place: str) -> None:
        self.asset, self.catalog, self.name, self.place = asset, catalog, name, place.rstrip("/")

    @property
    def _label(self) -> str:
        """The table in messages."""
        return f"{self.name} in the catalog {self.catalog}"

    @property
    def _location(self) -> str:
        """The directory as other engines need it: a URL, also of a local directory."""
        found = location(self.place)
        return found if re.match(r"[a-zA-Z][\w+.-]+:", found) else f"file://{found}"

    def last(self) -> dict[str, Any] | None:
        """Returns our last document; None = there is no table.

        Raises:
            StorageError: the catalog does not answer; another writer owns the table or the directory;
                or another writer has changed the table's rows since.
        """
        table = _open(self.catalog, self.name)
        if table is None:
            self._require_empty()
            return None
        document = _document(table)
        whose = None if document is None else document["asset"]
        if document is None or whose != self.asset:
            raise StorageError(
                f"{self.asset}: expected {self._label} to be new or its own table, got one that "
                f"{whose or 'another writer'} writes; give another catalog_table"
            )
        if table.location().rstrip("/") != self._location:
            raise StorageError(
                f"{self.asset}: expected the files of {self.name} in {self._location}, got "
                f"{table.location()}; set to=… to that place, or {_ANEW}"
            )
        changed = _changed(table, document["attempt"])
        if changed is not None:
            raise StorageError(
                f"{self.asset}: expected that only this export writes to {self._label}, but another "
                f"writer has changed it: {changed}. Roll it back to the snapshot with "
                f"{ATTEMPT}={document['attempt']} in its summary, or {_ANEW}"
            )
        return document

    def _require_empty(self) -> None:
        """Refuses a directory with files of another writer. An export that was dropped or killed leaves
        only ``metadata``, and its folders in ``data``."""
        found = {*names_in(self.place)} - {"data", "metadata"}
        found |= {n for n in names_in(f"{self.place}/data") if not _OWN_FOLDER.fullmatch(n)}
        if found:
            raise StorageError(
                f"{self.asset}: expected an empty place for {self.name} in {self.place}, got "
                f"{sorted(found)[:3]}; give the export another directory, or move that away"
            )

    def require_schema(self) -> None:
        """Refuses a table without its schema (namespace) in the catalog, before anything is written.

        Raises:
            StorageError: there is no such schema, or the catalog does not answer.
        """
        schema = self.name.rpartition(".")[0]
        with _asking(self.catalog):
            found = _catalog(self.catalog).namespace_exists(schema)
        if not found:
            raise StorageError(
                f"{self.asset}: expected a schema {schema} in the catalog {self.catalog}, got none; "
                f"create it (load_catalog({self.catalog!r}).create_namespace({schema!r}) of "
                "PyIceberg), or give another catalog_table"
            )

    def write(
        self,
        rows: DataFrame,
        *,
        document: dict[str, Any],
        after: str | None,
        append: bool,
        before: Callable[[], None],
    ) -> int:
        """Writes rows in one commit with a document, like ``parquet.write``.

        Args:
            document: must have ``batch`` and ``attempt``.
            after: attempt of the commit that this one must follow; None = there is no table.
            append: whether to keep the rows that are there.
            before: called right before the commit; raises to prevent it.

        Returns:
            the snapshot's id.

        Raises:
            ConcurrentRunError: another run committed at the same time, or the written files are gone.
            StorageError: Iceberg has no such type, the table's columns cannot change to those of the
                rows, or the catalog refuses the commit.
        """
        batch = document["batch"]
        columns = StructType.fromJson(nullable(rows.schema.jsonValue()))
        data, folder = f"{self.place}/data", f"{batch}-{uuid4().hex}"
        # Once the catalog has been asked to commit, only its refusal tells that it has not.
        committing = False
        try:
            with parquet.writing(data):
                adds = parquet.stage(rows, data, folder, self.asset)
            for _ in range(parquet.TRIES):
                table = _open(self.catalog, self.name)
                last = None if table is None else (_document(table) or {}).get("attempt", "")
                if last != after:
                    break
                require_written(data, adds)
                before()
                change = self._change(table, columns, adds, document, append)
                committing = True
                if self._commit(change, document["attempt"]):
                    return self._snapshot()
                committing = False
            raise parquet.conflict(self.asset, batch)
        except BaseException:
            if not committing:
                parquet.remove(posixpath.join(data, folder))
            raise

    def _change(
        self,
        table: Table | None,
        columns: StructType,
        adds: list[AddAction],
        document: dict[str, Any],
        append: bool,
    ) -> Transaction:
        """Returns the transaction that makes the commit.

        Raises:
            StorageError: the table does not take the files or their columns.
        """
        change = self._changed_by
        try:
            try:
                return change(table, columns, adds, document, append)
            except OverflowError:  # a date of no year from 1 to 9999, such as PostgreSQL's infinity
                return change(table, columns, adds, document, append, bounds_of_times=False)
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"{self.asset}: expected {self._label} to take the files of batch "
                f"{document['batch']}, got: {one_line(error)}; nothing was committed. If somebody has "
                f"altered the table (its partitions, its columns), {_ANEW}"
            ) from error

    def _changed_by(
        self,
        table: Table | None,
        columns: StructType,
        adds: list[AddAction],
        document: dict[str, Any],
        append: bool,
        bounds_of_times: bool = True,
    ) -> Transaction:
        """Returns the transaction that makes the commit, see :meth:`_change`.

        Args:
            bounds_of_times: whether the statistics of files have the smallest and largest date or time
                of a column. PyIceberg computes them as values of Python, whose range of years is
                smaller.
        """
        from pyiceberg.io.pyarrow import parquet_file_to_data_file

        files = [f"{self._location}/data/{one.path}" for one in adds]
        properties = {ASSET: self.asset, BATCH: str(document["batch"]), ATTEMPT: document["attempt"]}
        if table is None:
            schema = arrow_schema(columns)
            catalog = _catalog(self.catalog)
            change: Transaction = catalog.create_table_transaction(
                self.name, schema, location=self._location, properties=_PROPERTIES
            )
        else:
            change = table.transaction()
            if not append:
                self._evolve(change, columns)
        times = [] if bounds_of_times else [f for f in columns.fields if isinstance(f.dataType, _TIMES)]
        more = {f"write.metadata.metrics.column.{field.name}": "counts" for field in times}
        change.set_properties({DOCUMENT: json.dumps(with_format(document)), **more})
        if table is None or append:
            change.add_files(files, snapshot_properties=properties, check_duplicate_files=False)
            return change
        with change.update_snapshot(snapshot_properties=properties).overwrite() as replaced:
            for task in table.scan().plan_files():
                replaced.delete_data_file(task.file)
            for file in files:
                replaced.append_data_file(
                    parquet_file_to_data_file(table.io, change.table_metadata, file)
                )
        return change

    def _evolve(self, change: Transaction, columns: StructType) -> None:
        """Gives a table that is overwritten the columns of its new rows, in their order."""
        from pyiceberg.exceptions import ValidationError

        there = [field.name for field in change.table_metadata.schema().fields]
        try:
            with change.update_schema() as update:
                update.union_by_name(arrow_schema(columns))
                for name in there:
                    if name not in columns.names:
                        update.delete_column((name,))
                kept = [name for name in there if name in columns.names]
                if [*kept, *(n for n in columns.names if n not in there)] != columns.names:
                    update.move_first((columns.names[0],))
                    for left, name in pairwise(columns.names):
                        update.move_after((name,), (left,))
        except (ValueError, ValidationError) as error:
            raise StorageError(
                f"{self.asset}: expected columns that {self._label} can change to, got "
                f"{columns.simpleString()}: {one_line(error)}; {_ANEW}"
            ) from error

    def _commit(self, change: Transaction, attempt: str) -> bool:
        """Returns whether a commit was made; False = the table has changed, so the catalog refused it.

        Raises:
            StorageError: the catalog gave no clear answer, and the table does not have the commit.
        """
        from pyiceberg.exceptions import (
            CommitFailedException,
            TableAlreadyExistsError,
            ValidationException,
        )

        try:
            change.commit_transaction()
        except (CommitFailedException, TableAlreadyExistsError, ValidationException):
            return False
        except Exception as error:
            table = _open(self.catalog, self.name)
            if table is None or (_document(table) or {}).get("attempt") != attempt:
                raise StorageError(
                    f"{self.asset}: expected the catalog {self.catalog} to commit to {self.name}, got: "
                    f"{one_line(error)}. Run again: the next run finds out whether it has committed"
                ) from error
        return True

    def _table(self) -> Table:
        table = _open(self.catalog, self.name)
        if table is None:
            raise ConcurrentRunError(
                f"{self.asset}: expected {self._label}, which this run has written, but it was "
                "dropped since; run again"
            )
        return table

    def _snapshot(self) -> int:
        found = self._table().current_snapshot()
        return 0 if found is None else found.snapshot_id

    def rows(self) -> int:
        """Returns the number of rows of the current snapshot."""
        found = self._table().current_snapshot()
        summary = None if found is None else found.summary
        return 0 if summary is None else int(summary["total-records"] or 0)

    def types(self) -> dict[str, str]:
        """Returns the columns with their types in Iceberg."""
        return {field.name: str(field.field_type) for field in self._table().schema().fields}


def last_document(reference: str) -> dict[str, Any] | None:
    """Returns our last document in the table ``catalog:schema.table``; None = there is no such table,
    or another writer owns it."""
    table = _open(*reference.split(":"))
    return None if table is None else _document(table)


def renew(reference: str) -> None:
    """Makes the next run write the whole table ``catalog:schema.table``, because an erase has changed
    rows that are already committed there."""
    table = _open(*reference.split(":"))
    document = None if table is None else _document(table)
    if table is None or document is None:
        return
    with _asking(reference), table.transaction() as change:
        change.set_properties({DOCUMENT: json.dumps({**document, "export": None})})


def is_reference(text: str) -> bool:
    """Returns whether a text is ``catalog:schema.table``, and no directory or URL."""
    return _REFERENCE.fullmatch(text) is not None


def is_table(path: str) -> bool:
    """Returns whether a directory has the metadata of an Iceberg table."""
    return any(name.endswith(".metadata.json") for name in names_in(posixpath.join(path, "metadata")))


def _document(table: Table) -> dict[str, Any] | None:
    text = table.properties.get(DOCUMENT)
    if text is None:
        return None
    document = json.loads(text)
    require_format(table.location(), document, "the properties")
    return document


def _changed(table: Table, attempt: str) -> str | None:
    """Returns how another writer has changed the rows since our commit; None = not at all. Rewriting
    files (``replace``) changes no rows."""
    from pyiceberg.table.snapshots import Operation

    snapshot = table.current_snapshot()
    if snapshot is None:
        return "a table without rows"
    while snapshot is not None:
        summary = snapshot.summary
        operation = None if summary is None else summary.operation
        properties = {} if summary is None else summary.additional_properties
        if properties.get(ATTEMPT) == attempt:
            return None
        if ATTEMPT in properties:
            return (
                f"a roll-back to the snapshot {snapshot.snapshot_id} of batch {properties.get(BATCH)}"
            )
        if operation is not Operation.REPLACE:
            what = "a change" if operation is None else operation.value
            return f"{what} in the snapshot {snapshot.snapshot_id}"
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    return None


def _catalog(name: str) -> Catalog:
    from pyiceberg.catalog import load_catalog

    return load_catalog(name)


def _open(catalog: str, name: str) -> Table | None:
    with _asking(catalog):
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return _catalog(catalog).load_table(name)
        except (NoSuchNamespaceError, NoSuchTableError):
            return None


@contextlib.contextmanager
def _asking(catalog: str) -> Iterator[None]:
    """Turns errors of PyIceberg, which come from many libraries, into one readable sentence.

    Raises:
        StorageError: PyIceberg is missing, or the catalog is unknown or does not answer.
    """
    try:
        yield
    except (StorageError, ConcurrentRunError):
        raise
    except ImportError as error:
        raise StorageError(
            f"expected the package pyiceberg with what the catalog {catalog} needs, got: "
            f'{one_line(error)}; install "vt-dagster[iceberg]", and for example "pyiceberg[glue]"'
        ) from error
    except Exception as error:
        raise StorageError(
            f"expected the catalog {catalog} of PyIceberg's configuration to answer, got: "
            f"{one_line(error)}. Describe it in .pyiceberg.yaml, or by "
            f"PYICEBERG_CATALOG__{catalog.upper()}__URI and other variables"
        ) from error
