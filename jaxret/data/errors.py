"""Errors of bad records: location, problem and remedy, and the policy that raises or counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

Content = TypeVar("Content")
Value = TypeVar("Value")
ON_ERROR = ("error", "skip", "keep")  # the ways in which a Policy treats bad records


class DataError(ValueError):
    """An error in input. Its text is "FILE:LINE: problem; remedy". `reason` is a short name of the problem, for
    counting."""

    def __init__(self, location: Location, reason: str, problem: str, remedy: str) -> None:
        super().__init__(location, reason, problem, remedy)
        self.location, self.reason, self.problem, self.remedy = location, reason, problem, remedy

    def __str__(self) -> str:
        return f"{self.location}: {self.problem}; {self.remedy}"


class Location(NamedTuple):
    """A location in a file."""

    path: Path
    line: int | str | None = None  # Number from 1; words in a file without lines ("record 7"); None: the whole file

    def __str__(self) -> str:
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"

    def error(self, reason: str, problem: str, remedy: str) -> DataError:
        """Return an error at this location, which the caller raises or rejects (`Policy.reject`)."""
        return DataError(self, reason, problem, remedy)


@dataclass
class Policy:
    """How to treat bad records.

    "error" raises the first error. "skip" leaves bad records out and counts them by reason. "keep" keeps and counts
    passages without title and text, so that every row of the file is a row of vectors, and raises all other errors.

    A location is counted once for each reason, also if the file is read twice (scanned, then streamed). Missing and
    truncated files, and lines above `LINE_LIMIT`, are always errors, because the records in them are unknown.
    """

    on_error: str = "error"  # one of ON_ERROR
    examples_per_reason: int = 3  # Locations that the report lists for each reason
    # Reason -> number of records that were left out (under "keep": kept)
    skip_counts: Counter[str] = field(default_factory=Counter, init=False)
    notes: dict[str, set[Location]] = field(default_factory=dict, init=False)  # Kind of note -> its locations
    _locations: dict[str, set[Location]] = field(default_factory=dict, init=False, repr=False)
    _examples: dict[str, list[Location]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error is {self.on_error!r}; it must be one of {', '.join(ON_ERROR)}")

    def reject(self, error: DataError) -> None:
        """Raise `error`, or count it under its reason."""
        if self.on_error != "skip":
            raise error
        self._count(error)

    def parse_records(
        self, records: Iterable[tuple[Location, Content]], parse: Callable[[Content, Location], Value]
    ) -> Iterator[tuple[Location, Value]]:
        """Yield (location, `parse(record, location)`) of each record, and reject those for which `parse` raises
        DataError."""
        for location, record in records:
            try:
                value = parse(record, location)
            except DataError as error:
                self.reject(error)
                continue
            yield location, value

    def reject_empty(self, error: DataError) -> None:
        """Raise the error of an empty passage. Under "keep", count it; the caller keeps the passage."""
        if self.on_error != "keep":
            raise error
        self._count(error)

    def _count(self, error: DataError) -> None:
        reason = error.reason
        locations = self._locations.setdefault(reason, set())
        if error.location in locations:
            return
        locations.add(error.location)
        self.skip_counts[reason] += 1
        if self.skip_counts[reason] <= self.examples_per_reason:
            self._examples.setdefault(reason, []).append(error.location)

    def note(self, kind: str, location: Location) -> None:
        """Count a line or record that is left out although it is not bad, such as a header line."""
        self.notes.setdefault(kind, set()).add(location)

    def report(self) -> str:
        """Return "skipped 2 records: 1 empty passage (corpus.jsonl:7), ...; noted: ...", or "" if nothing was left
        out."""
        notes = "; ".join(self.describe_notes())
        return "; ".join(part for part in (self._describe_skips(), notes and f"noted: {notes}") if part)

    def describe_notes(self) -> list[str]:
        """Return a phrase for each kind of note: how often it occurred, and the first location."""
        first = {
            kind: min(locations, key=lambda location: (str(location.path), str(location.line)))
            for kind, locations in self.notes.items()
        }
        return [
            f"{len(locations):,} {kind} (first: {first[kind]._replace(path=Path(first[kind].path.name))})"
            for kind, locations in self.notes.items()
        ]

    def _describe_skips(self) -> str:
        if not self.skip_counts:
            return ""
        total = self.skip_counts.total()
        parts = []
        for reason, count in self.skip_counts.most_common():
            examples = [str(location._replace(path=Path(location.path.name))) for location in self._examples[reason]]
            if count > len(examples):
                examples.append("...")
            plural = "s" if self.on_error == "keep" and count > 1 else ""
            parts.append(f"{count} {reason}{plural} ({', '.join(examples)})")
        if self.on_error == "keep":
            return f"kept {parts[0]}"
        return f"skipped {total} record{'s' if total != 1 else ''}: {', '.join(parts)}"
