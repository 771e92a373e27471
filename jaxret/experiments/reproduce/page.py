"""Write docs/reproduce.md from the papers' tables: python -m jaxret.experiments.reproduce.page > docs/reproduce.md"""

from __future__ import annotations

from typing import Any

from jaxret.evaluation.text_table import markdown_table
from jaxret.experiments.reproduce.listing import row_numbers
from jaxret.experiments.reproduce.papers import PAPERS, PaperRow, datasets, paper_rows, paper_title

INTRODUCTION = """# Reproducing the papers

Every row of every table of the papers, and every point of the figures that are sweeps, with its config and the numbers
that the paper prints (figures print none). A sweep of your own is [one command](sweeps.md). This page is
made from `jaxret/experiments/reproduce/tables/`; do not edit it. Numbers are fractions, also where the paper prints
percentages.

    jaxret reproduce                                             # the tables
    jaxret reproduce mlr/2/mlr-10-12 --data=DATA                 # the commands of a row, and the files that they need
    jaxret reproduce mlr/2/mlr-10-12 --data=DATA --run --on=nq   # run them; prints the paper's numbers beside the run's

**None of these rows has been run in full.** They need the data below and accelerators for hours to days (`jaxret plan`
computes memory and time). What small models on two cores can show of the papers' claims is in
[evidence](evidence.md). Many differences in the tables are of one seed and within the noise of a run: run several and
compare them with `jaxret compare` ([evaluation](evaluation.md)).

Settings that the tables do not show:

- MLR's 4 GPUs and DPR's 8 averaged gradients of a gathered loss, so that a limit of 2.0 clipped at 8 and 16:
  `--set=optimizer.reference_processes=4` (or 8) does the same.
- The first time, add `--set=encoder.download=True`.
- MLR counts 502,939 training queries of MS MARCO, Aggretriever 532,761 (query, positive) pairs of the same.
- Accuracy@20 of a dual encoder on SQuAD is .566 in MLR, .632 in DPR's own paper, and .768 in MVR (as it says, with two
  million passages). Compare within a paper only. MVR's "SQuAD dev" is taken to be SQuAD's own development set, the
  questions that DPR and MLR call the test set: DPR has published no questions with answers of its dev part.
- I3's pseudo-queries are from Flan-T5-XL, zero-shot; the paper states no prompt. `jaxret generate --model=FLAN-T5-XL
  --corpus=COLLECTION --out=generated` makes them ([generated queries](generation.md)):
  `--set=data.pseudo_queries=generated/pseudo-queries.jsonl`. The paper does not say which checkpoint it keeps; here it
  is the best on `data.dev`, which should be no set that is reported.
- MVR has no published code. What its paper leaves open is in [methods](methods.md).
"""


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, "## Data\n\n" + _data()]
    for paper in PAPERS:
        title, authors = paper_title(paper)
        parts.append(f"## {paper}: {title} ({authors})")
        tables: dict[str, list[PaperRow]] = {}
        for row in paper_rows().values():
            if row.id.startswith(f"{paper}/"):
                tables.setdefault(row.id.split("/")[1], []).append(row)
        for number, members in tables.items():
            parts.append(f"### {number}: {members[0].caption}\n\n{_table(members)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _data() -> str:
    """The data sets: the folder below --data, its files, and where each comes from."""
    lines = []
    for name, data in datasets().items():
        files = "; ".join(f"`{path}` ({origin})" for path, origin in data.files.items())
        lines.append([f"`{data.folder or name}`", data.title, files])
    return markdown_table(["folder", "data set", "files"], lines, left=3)


def _table(members: list[PaperRow]) -> str:
    lines = [[f"`{row.id.rpartition('/')[2]}`", _system(row), "<br>".join(row_numbers(row))] for row in members]
    return markdown_table(["row", "config", "the paper's numbers"], lines, left=3)


def _system(row: PaperRow) -> str:
    """The config of a row with its keys, or the reason why there is none."""
    notes = [row.note] if row.note else []
    if row.same_as:
        return "; ".join([f"as `{row.same_as}`", *notes])
    if row.reason:
        return f"not run: {row.reason}"
    configs = [row.config] if isinstance(row.config, str) else list(dict.fromkeys(row.config.values()))
    parts = [f"`{config}`" for config in configs if config]
    parts += [f"`{key}={_value(value)}`" for key, value in row.set.items()]
    if row.verb == "recipe":
        parts.append(f"`jaxret recipe`, {row.stage}")
    if row.verb == "bm25":
        parts.insert(0, "`jaxret bm25`")
    if row.seeds > 1 and row.verb != "bm25":
        parts.append(f"{row.seeds} seeds")
    return "; ".join([", ".join(parts) or "`jaxret data check`", *notes])


def _value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


if __name__ == "__main__":
    print(page(), end="")
