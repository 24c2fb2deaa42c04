"""The buffer of suppress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tests.core.reference.run import Config, Refused

T = TypeVar("T")


class NotCovered(Exception):
    """The scenario has limits in bytes, which this model leaves out."""


class Buffer(Generic[T]):
    """Holds the last update of each key at the place of its first one, until stream time passes it.

    Args:
        suppress: the limits.
        duration: how far stream time must pass an update's place before the update leaves.
        let_out: is called with each update that leaves.
        after: an update leaves only when stream time is later than that limit, not when it is equal.
    """

    def __init__(
        self, suppress: Config, duration: int, let_out: Callable[[T], None], after: bool = False
    ) -> None:
        if suppress.get("max_bytes") is not None:
            raise NotCovered("max_bytes")
        self.most, self.when_full = suppress["max_records"], suppress["when_full"]
        self.duration, self.let_out, self.after = duration, let_out, after
        self.time = -1
        self.places: dict[bytes, int] = {}
        self.held: dict[bytes, T] = {}

    def put(self, place: int, key: bytes, timestamp: int, update: T) -> None:
        """Takes an update; ``key`` orders updates of the same place."""
        self.time = max(self.time, timestamp)
        self.places.setdefault(key, place)
        self.held[key] = update
        limit = self.time - self.duration - self.after
        while self.held and self.places[self._first()] <= limit:
            self._evict()
        if self.most is None or len(self.held) <= self.most or self.when_full == "unbounded":
            return
        if self.when_full == "shut_down":
            raise Refused("StreamsException", f"more than {self.most} records are suppressed")
        while len(self.held) > self.most:
            self._evict()

    def _first(self) -> bytes:
        return min(self.held, key=lambda key: (self.places[key], key))

    def _evict(self) -> None:
        first = self._first()
        self.places.pop(first)
        self.let_out(self.held.pop(first))
