"""Print tables, rows and commands of the papers, as `jaxret reproduce` does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxret.configs import load_config, require_keys
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.reproduce.commands import Reproduction, case_commands, missing_files
from jaxret.experiments.reproduce.papers import Case, PaperRow, datasets, find_rows, paper_rows, resolve_row
from jaxret.experiments.reproduce.run_row import case_seeds, comparison_table, run_row
from jaxret.parallel.events import emit


def list_rows(
    pattern: str, data: str, workdir: str, overrides: Sequence[str], run_on: str | None, scale: float = 1.0
) -> None:
    """Print the rows that a pattern names, or run them.

    Args:
        pattern: PAPER, PAPER/TABLE, PAPER/TABLE/ROW; "" for all tables.
        data: folder with a folder for each data set.
        workdir: folder of the runs.
        overrides: "KEY=VALUE" for keys of the config.
        run_on: name of the data set to run on; "" for all of the row; None to print only.
        scale: fraction of the paper's steps or epochs.

    Raises:
        ValueError: the row is unknown or cannot be run, or an override has no "=".
    """
    for entry in overrides:
        if "=" not in entry:
            raise ValueError(f"--set={entry} must be KEY=VALUE")
    reproduction = Reproduction(Path(data), Path(workdir), dict(entry.split("=", 1) for entry in overrides), scale)
    if not pattern:
        if run_on is not None:
            raise ValueError("--run needs a row, such as mlr/2/dual-encoder; `jaxret reproduce` lists the tables")
        _print_listing(tables_text())
        return
    rows = find_rows(pattern)
    for config in {case.config for row in rows for case in resolve_row(row).cases() if case.config}:
        require_keys(load_config(config), reproduction.overrides, config)
    if run_on is not None:
        if len(rows) > 1:
            raise ValueError(f"{pattern} has {len(rows)} rows; --run takes one: {', '.join(row.id for row in rows)}")
        (row,) = rows
        measurements = run_row(row, reproduction, run_on)
        numbers = "\n".join(["the paper's numbers:", *row_numbers(row)])
        print(comparison_table(measurements) if measurements else numbers)
        values = [
            {"target": entry.case.target.name, "measure": entry.measure, "value": entry.value, "paper": entry.paper}
            for entry in measurements
        ]
        emit("reproduction", row=row.id, measured=values)
        if scale != 1.0:
            print(f"a trial with {scale:g} of the training: compare the commands, not the numbers")
    elif len(rows) == 1 and rows[0].id == pattern:
        _print_listing(row_text(rows[0], reproduction))
    else:
        _print_listing(numbers_text(rows))


def _print_listing(text: str) -> None:
    print(text)
    emit("listing", lines=text.splitlines())


def tables_text() -> str:
    """Return a line for each table: caption, number of rows, and number of rows that can be run."""
    tables: dict[str, list[PaperRow]] = {}
    for row in paper_rows().values():
        tables.setdefault(row.id.rpartition("/")[0], []).append(row)
    lines = [
        [name, members[0].caption, str(sum(row.runnable for row in members)), str(len(members))]
        for name, members in tables.items()
    ]
    return aligned_table(["table", "caption", "runnable", "rows"], lines, left=2)


def numbers_text(rows: Sequence[PaperRow]) -> str:
    """Return the paper's numbers of rows, and the reason for each row that cannot be run."""
    lines = []
    for row in rows:
        lines.append(row.id + ("" if row.runnable else f"  (not run here: {row.reason or 'no config'})"))
        lines += [f"    {line}" for line in row_numbers(row)]
    return "\n".join(lines)


def row_numbers(row: PaperRow) -> Iterator[str]:
    """Yield a line of the paper's numbers for each data set of a row."""
    for case in row.cases():
        if case.row.counts:
            parts = (f"{number:,} {name}" for name, number in zip(case.measures, case.numbers, strict=True))
            yield f"{case.target.name}: {', '.join(parts)}"
            continue
        values = [
            f"{measure} {'-' if number is None else f'{number:.4g}'}{_deviation(case, index)}"
            for index, (measure, number) in enumerate(zip(case.measures, case.numbers, strict=True))
        ]
        is_same = case.source == case.target or resolve_row(row).verb == "bm25"
        note = "" if is_same else f" (trained on {case.source.name})"
        yield f"{case.target.name}{note}: {', '.join(values)}"
    for name, times in row.milliseconds.items():
        yield f"{name}: {', '.join(f'{time:g} ms' for time in times)}"
    if row.gib:
        yield f"vectors: {row.gib:g} GiB"
    if row.subsets:
        yield f"set 0: {row.subsets[0]:g}, set 1: {row.subsets[1]:g}"
    if row.numbers_each:
        sets = row.each or datasets()["beir"].each
        yield ", ".join(f"{name} {number:g}" for name, number in zip(sets, row.numbers_each, strict=True))


def _deviation(case: Case, index: int) -> str:
    """Return the paper's deviation over seeds of a case's number as " ± 0.003"; "" if it prints none."""
    deviations = case.row.deviations.get(case.target.name)
    if not deviations:
        return ""
    return f" ± {deviations[index] / (100 if case.row.percent else 1):.4g}"


def row_text(row: PaperRow, reproduction: Reproduction) -> str:
    """Return caption, numbers, commands and missing files of a row."""
    lines = [f"{row.id}: {row.caption}", *row_numbers(row)]
    if row.note:
        lines.append(f"note: {row.note}")
    if row.same_as:
        lines.append(f"the same system as {row.same_as}")
    if not row.runnable:
        return "\n".join([*lines, f"not run here: {row.reason or 'no config'}"])
    earlier_lines: set[str] = set()
    missing_lines: dict[str, None] = {}
    for case in row.cases() or resolve_row(row).cases():
        for seed in case_seeds(case):
            for command in case_commands(case, reproduction, seed):
                if (line := f"jaxret {shlex.join(command)}") not in earlier_lines:
                    earlier_lines.add(line)
                    lines.append(line)
        missing_lines |= dict.fromkeys(missing_files(case, reproduction))
    if missing_lines:
        lines += ["missing files, and where each comes from:", *(f"  {line}" for line in missing_lines)]
    return "\n".join(lines)
