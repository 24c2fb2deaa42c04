"""Windowed aggregation of a stream, with suppress: tumbling, hopping, session, sliding windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tests.core.reference.run import Config, Record, Refused, Run, number
from tests.core.reference.suppress import Buffer


@dataclass(frozen=True)
class Result:
    """A window's result that is forwarded; the value None is the tombstone of a merged session."""

    key: str
    start: int
    end: int
    value: int | None
    timestamp: int


class Windows(ABC):
    """The common part of all windows: stream time, the amount of a record, the target of results."""

    def __init__(self, run: Run, config: Config) -> None:
        window, suppress = config["window"], config["suppress"]
        self.run = run
        self.kind: str = window["type"]
        self.counts = config["aggregate"] == "count"
        self.size: int = window["gap"] if self.kind == "session" else window["size"]
        self.grace: int = window["grace"]
        self.advance: int = window.get("advance", self.size)
        needed = (2 if self.kind == "sliding" else 1) * self.size + self.grace
        self.retention: int = needed if window.get("retention") is None else window["retention"]
        least = 0 if self.kind == "session" else 1  # a session with gap 0 has equal timestamps
        if self.retention < needed or self.grace < 0 or not least <= self.advance <= self.size:
            raise Refused("IllegalArgumentException", "a window that has no meaning")
        self.time = -1
        self.buffer: Buffer[Result] | None = None
        self.final = suppress is not None and suppress["until"] == "window_closes"
        if suppress is not None:
            closes = self.grace + (self.size if self.kind == "session" else 0)
            duration = closes if self.final else suppress["duration"]
            after = self.final and self.kind == "session"
            self.buffer = Buffer(suppress, duration, self.let_out, after=after)

    def receive(self, record: Record) -> None:
        if record.key is None or (record.value is None and self.kind == "sliding"):
            self.run.drop()
            return
        self.time = max(self.time, record.timestamp)
        self.add(record.key, 1 if self.counts else number(record.value) or 0, record.timestamp)

    @abstractmethod
    def add(self, key: str, amount: int, timestamp: int) -> None: ...

    def forward(self, result: Result) -> None:
        if self.buffer is None:
            self.let_out(result)
            return
        place = result.end if self.final else result.timestamp
        bounds = [result.end, result.start] if self.kind == "session" else [result.start]
        order = result.key.encode() + b"".join(n.to_bytes(8, "big") for n in bounds)
        self.buffer.put(place, order, result.timestamp, result)

    def let_out(self, result: Result) -> None:
        if result.value is not None or not self.final:
            value = None if result.value is None else str(result.value)
            bounds = {"window_start": result.start, "window_end": result.end}
            self.run.emit(result.key, value, result.timestamp, **bounds)


class FixedWindows(Windows):
    """Tumbling and hopping windows."""

    def __init__(self, run: Run, config: Config) -> None:
        super().__init__(run, config)
        self.windows: dict[tuple[str, int], Result] = {}

    def add(self, key: str, amount: int, timestamp: int) -> None:
        first = max(0, timestamp - self.size + self.advance) // self.advance * self.advance
        for start in range(first, timestamp + 1, self.advance):
            end = start + self.size
            if end <= self.time - self.grace:
                self.run.drop()
                continue
            was = self.windows.get((key, start))
            total = (was.value or 0 if was else 0) + amount
            at = max(was.timestamp, timestamp) if was else timestamp
            self.windows[key, start] = Result(key, start, end, total, at)
            self.forward(self.windows[key, start])


class Sessions(Windows):
    """Session windows: only open ones merge, and the store's retention has no effect."""

    def __init__(self, run: Run, config: Config) -> None:
        super().__init__(run, config)
        self.sessions: dict[str, list[Result]] = {}

    def open(self, end: int) -> bool:
        return end >= self.time - self.grace - self.size

    def add(self, key: str, amount: int, timestamp: int) -> None:
        own = self.sessions.setdefault(key, [])
        near = (timestamp - self.size, timestamp + self.size)
        found = [s for s in own if s.end >= near[0] and s.start <= near[1] and self.open(s.end)]
        start = min([timestamp, *(s.start for s in found)])
        end = max([timestamp, *(s.end for s in found)])
        if not self.open(end):
            self.run.drop()
            return
        merged = Result(key, start, end, amount + sum(s.value or 0 for s in found), end)
        self.sessions[key] = [*(s for s in own if s not in found), merged]
        if (start, end) != (timestamp, timestamp):
            for s in sorted(found, key=lambda s: (s.end, s.start)):
                self.forward(Result(key, s.start, s.end, None, s.end))
        self.forward(merged)


class SlidingWindows(Windows):
    """Sliding windows: there is a window [start, start + size] where a record enters or leaves one."""

    def __init__(self, run: Run, config: Config) -> None:
        super().__init__(run, config)
        self.windows: dict[str, dict[int, Result]] = {}
        self.newest = -1

    def add(self, key: str, amount: int, timestamp: int) -> None:
        if timestamp + self.size < self.time - self.grace:
            self.run.drop()
        elif timestamp >= self.size:
            self.later(key, amount, timestamp)
        else:
            self.early(key, amount, timestamp)

    def near(self, key: str, first: int, last: int) -> list[Result]:
        oldest = max(first, self.newest - self.retention + 1)
        found = self.windows.setdefault(key, {})
        return [found[s] for s in sorted(found) if oldest <= s <= last]

    def later(self, key: str, amount: int, t: int) -> None:
        met: set[int] = set()
        right_base: Result | None = None
        left_base: Result | None = None
        before: int | None = None
        for window in reversed(self.near(key, max(0, t - 2 * self.size), t + 1)):
            met.add(window.start)
            if window.start == t + 1:
                continue
            if window.end > t:
                right_base = right_base or window
                self.update(key, window.start, window, amount, t)
            elif window.end == t:
                self.update(key, window.start, window, amount, t)
                if window.timestamp == t:
                    return
                before = window.timestamp
            else:
                before, left_base = window.timestamp, window
                break
        self.after_previous(key, amount, t, before, met)
        if t - self.size not in met:
            kept = left_base if before is not None and before >= t - self.size else None
            self.update(key, t - self.size, kept, amount, t)
        self.right(key, t, right_base, met)

    def early(self, key: str, amount: int, t: int) -> None:
        met: set[int] = set()
        right_base: Result | None = None
        zero: Result | None = None
        before: int | None = None
        for window in self.near(key, 0, t + 1):
            met.add(window.start)
            if window.start == 0:
                zero = window
                before = window.timestamp if window.timestamp < t else None
            elif window.start <= t:
                right_base = window
                self.update(key, window.start, window, amount, t)
        if right_base is None and zero is not None and zero.timestamp > t:
            right_base = zero
        self.right(key, t, right_base, met)
        self.after_previous(key, amount, t, before, met)
        self.update(key, 0, zero, amount, t)

    def after_previous(self, key: str, amount: int, t: int, before: int | None, met: set[int]) -> None:
        """Makes the window that begins just after the record before this one."""
        if before is not None and before + 1 not in met and before + 1 + self.size >= t:
            self.update(key, before + 1, None, amount, t)

    def right(self, key: str, t: int, base: Result | None, met: set[int]) -> None:
        """Makes the window that begins just after this record."""
        if t + 1 not in met and base is not None and base.timestamp > t:
            self.store(Result(key, t + 1, t + 1 + self.size, base.value, base.timestamp))

    def update(self, key: str, start: int, was: Result | None, amount: int, t: int) -> None:
        if start + self.size < self.time - self.grace:
            self.run.drop()
            return
        total = (was.value or 0 if was else 0) + amount
        at = max(was.timestamp, t) if was else t
        self.store(Result(key, start, start + self.size, total, at))

    def store(self, result: Result) -> None:
        self.windows[result.key][result.start] = result
        self.newest = max(self.newest, result.start)
        self.forward(result)


def windows_of(run: Run, config: Config) -> Windows:
    kinds = {"session": Sessions, "sliding": SlidingWindows}
    return kinds.get(config["window"]["type"], FixedWindows)(run, config)
