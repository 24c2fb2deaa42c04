"""suppress: buffers updates of a table and emits fewer of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import FOREVER, Duration, check_duration, spoken
from vt_dagster.topology.operators.base import OneInput, make_table, need_table
from vt_dagster.topology.specification import SuppressSpec, TimeLimitSpec, WindowClosesSpec
from vt_dagster.topology.windows import Window

WhenFull = Literal["emit_early", "shut_down", "unbounded"]
Limit = int | Mapping[int, int | None] | None
"""Most records or bytes in a partition's buffer; None = no limit."""


@dataclass(frozen=True)
class UntilTimeLimit:
    """Emits at most one update of a key per ``duration`` of stream time (KIP-328).

    Args:
        duration: how long the first update of a key waits for others, in stream time; then the last
            of them is emitted.
        max_records, max_bytes: limits of a partition's buffer; None = no limit. Bytes are those of
            the rows as JSON text.
        when_full: ``emit_early``: the oldest updates are emitted early; ``shut_down``: the run fails
            before its commit; ``unbounded``: no limit (the buffer is on disk).
    """

    duration: Duration
    max_records: Limit = None
    max_bytes: Limit = None
    when_full: WhenFull = "emit_early"

    @property
    def specification(self) -> TimeLimitSpec:
        """The limit as commits store it."""
        return TimeLimitSpec(**vars(self))


@dataclass(frozen=True)
class UntilWindowCloses:
    """Emits only the final result of each window, once (KIP-328).

    Args:
        max_records, max_bytes: as in :class:`UntilTimeLimit`.
        when_full: ``shut_down`` or ``unbounded``. ``emit_early`` is refused: an early result is not
            final.
    """

    max_records: Limit = None
    max_bytes: Limit = None
    when_full: WhenFull = "unbounded"

    @property
    def specification(self) -> WindowClosesSpec:
        """The limit as commits store it."""
        return WindowClosesSpec(**vars(self))


@dataclass(frozen=True)
class Suppress(OneInput):
    """Buffers updates of a table until a time limit, or until a window closes (KIP-328).

    Each materialization has KIP-328's metrics: ``suppression_emit`` (from the first result on), and
    ``suppression_buffer_count_*`` and ``suppression_buffer_size_*`` (``current``, ``avg``, ``max``;
    size in bytes of JSON text).
    ``when_full="shut_down"`` fails a run before its commit, with an error that names the buffer and its
    limit; the next run with a larger limit reads the same records again.

    Late: an update replaces the buffered update of its key, even a newer one, and takes its place in
    the buffer; an update that is already due on arrival is emitted after the updates due before it.
    Null key: a table has none. Tombstone: with a time limit, emitted like any update; until a window
    closes, it takes the window's place in the buffer and is never emitted.
    """

    until: UntilTimeLimit | UntilWindowCloses = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        need_table(self.name, "suppress", self.source)
        until: Any = self.until
        if self.source.versioned:
            raise TopologyError(
                f"{self.name}: suppress would lose versions of the versioned table "
                f"{self.source.name!r}; materialize it as a plain table first, for example "
                "filter('true', name=..., materialized=Materialized())"
            )
        if until.when_full not in ("emit_early", "shut_down", "unbounded"):
            raise TopologyError(
                f"{self.name}: when_full must be 'emit_early', 'shut_down' or 'unbounded', got "
                f"{until.when_full!r}"
            )
        for what in ("max_records", "max_bytes"):
            self._check_limit(what, getattr(until, what))
        if isinstance(until, UntilTimeLimit):
            check_duration(self.name, "duration", until.duration, FOREVER)
            return
        if until.when_full == "emit_early":
            raise TopologyError(
                f"{self.name}: until_window_closes emits final results only, so a full buffer "
                "cannot emit early; use when_full='shut_down' or 'unbounded'"
            )
        self._closing()

    def _check_limit(self, what: str, limit: Any) -> None:
        every: list[Any] = [limit]
        if isinstance(limit, Mapping):
            every = list(cast(Mapping[int, Any], limit).values())
        wrong = [n for n in every if n is not None and (type(n) is not int or n < 0)]
        if wrong:
            raise TopologyError(f"{self.name}: {what} must be a number, 0 or more, got {wrong[0]!r}")
        if any(n is not None for n in every) and self.until.when_full == "unbounded":
            raise TopologyError(
                f"{self.name}: {what} is set, but when_full='unbounded' has no limit; remove one of "
                "the two"
            )

    @property
    def window(self) -> Window | None:
        return self.source.window

    def _closing(self) -> Window:
        if self.window is None:
            raise TopologyError(
                f"{self.name}: until_window_closes needs a windowed table, but {self.source.name!r} "
                "has no windows; aggregate a stream with windowed_by(...), or use UntilTimeLimit"
            )
        return self.window

    @property
    def period(self) -> Duration:
        """How long an update stays in the buffer, in stream time."""
        if isinstance(self.until, UntilTimeLimit):
            return self.until.duration
        return self._closing().closes_after

    @property
    def specification(self) -> SuppressSpec:
        return SuppressSpec(source=self.source.name, until=self.until.specification)

    def result(self, **shown: Any) -> Any:
        return make_table(self, self.source, self.source.schema, None, shown)

    def describe(self) -> str:
        if isinstance(self.until, UntilWindowCloses):
            return f"{self.source.name}, each window once, after it has closed."
        return f"{self.source.name}, at most one update of a key per {spoken(self.until.duration)}."
