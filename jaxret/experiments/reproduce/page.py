"""Write docs/reproduce.md from the papers' tables: python -m jaxret.experiments.reproduce.page > docs/reproduce.md"""

from __future__ import annotations

from jaxret.evaluation.text_table import markdown_table
from jaxret.experiments.config_values import flag_text
from jaxret.experiments.reproduce.listing import row_numbers
from jaxret.experiments.reproduce.papers import PAPERS, PaperRow, datasets, paper_rows, paper_title

INTRODUCTION = """# Reproducing the papers

This page lists every row of every table of the papers, and every point of the figures that are sweeps, with its config
and the paper's numbers (figures print none). Numbers are fractions, also where the paper prints percentages. For a
sweep of your own see [sweeps](sweeps.md). The page is generated from `jaxret/experiments/reproduce/tables/`; do not
edit it.

    jaxret reproduce                                             # all tables
    jaxret reproduce mlr/2/mlr-10-12 --data=DATA                 # the commands of a row, and the files that they need
    jaxret reproduce mlr/2/mlr-10-12 --data=DATA --run --on=nq   # run them; prints the paper's numbers beside the run's

**None of these rows has been run in full.** The rows need the data below and accelerators for hours to days (`jaxret
plan` computes memory and time). [Evidence](evidence.md) tests the papers' claims with small models on two cores. Many
numbers in the tables are of one seed, and small differences can be noise: run several seeds and compare them with
`jaxret compare` ([evaluation](evaluation.md)).

Settings that the tables do not show:

- The code of MLR (4 GPUs) and of DPR (8 GPUs) averages the gradients of a gathered loss. The gradient limit of 2.0
  therefore clips at 8 and 16. `--set=optimizer.reference_processes=4` (or 8) has the same effect. MVR is built on DPR's
  code and was also trained on 8 GPUs.
- Some records of DPR's TriviaQA and SQuAD files have no positive passage. `data.on_error=skip` leaves them out and
  counts them.
- Rows whose models are trained by the same command share one run in `--workdir`, named after the first of them: stages
  of a recipe, and systems that several tables have. A row reuses models, vectors and mined files of earlier rows.
- Add `--set=encoder.download=True` if the encoder is not in the local cache of Hugging Face.
- MLR and I3 count 502,939 training queries of MS MARCO. Aggretriever's 532,761 "training queries" are the (query,
  positive) pairs of the same data.
- Most configs multiply in bfloat16. MLR's scripts train in float32, I3's with float16: `--set=encoder.dtype=float32`.
- Accuracy@20 of a dual encoder on SQuAD is .566 in MLR, .632 in DPR's own paper, and .764 (table 1) and .768 (table 2)
  in MVR, whose corpus has "about two million passages". Compare numbers only within a paper.
- MVR's "SQuAD dev" is assumed to be SQuAD's own development set, which DPR and MLR call the test set. DPR's
  download script has no file of questions with answers for DPR's dev split.
- The codes of MLR and I3 read MS MARCO's passages with RocketQA's titles, which `collection.tsv` does not have: their
  rows are on `msmarco_titles`. I3's code writes "NA" for a missing title; jaxret writes nothing.
- MLR, I3 and Aggretriever train on all of these queries with BM25's negatives, at a depth that no paper states. The
  commands mine them with `jaxret mine --pool=bm25`: 100 drawn from the first 1,000, once for all rows in a `--workdir`;
  recipes whose first stage mines need no such file. MS MARCO's own file, `qidpidtriples.train.full.2.tsv.gz`, is not
  used: it has negatives for 400,782 of the 502,939 queries (992 each), and takes 39 GB to read (99 bytes a triple,
  measured on 792,000). Do not put it into the folder: training and mining would then read only its queries. The
  published codes read a file that was made from it; in MLR's code the other queries get random passages.
- Aggretriever's code joins the title and the text of a BEIR passage by a space. The rows trained on MS MARCO do the
  same. The rows trained on NQ and TriviaQA follow DPR and put [SEP] between them, also on BEIR.
- I3's pseudo-queries are from Flan-T5-XL, zero-shot; the paper states no prompt. The commands generate one for every
  passage ([generated queries](generation.md)), train the head on them, and continue from this run.
- No row on MS MARCO has a dev set, so the last checkpoint is measured. MLR takes the last one (section 4.3.2). I3's
  paper does not say; its code keeps the best on the questions that it reports. To keep the best of your own dev set:
  `--set=data.dev=FOLDER --set=validation.best=metric`.
- Rows of language models that say "ours" have no published number; `jaxret reproduce --run` prints only the run's.
  Their parameters are split over all devices. Negatives of SciFact are mined like those of MS MARCO.
- MVR has no published code. [Methods](methods.md#mvr) lists the settings that its paper leaves open.
"""


def page() -> str:
    """Return the text of docs/reproduce.md."""
    parts = [INTRODUCTION, "## Data\n\n" + _data_table()]
    for paper in PAPERS:
        title, authors = paper_title(paper)
        parts.append(f"## {paper}: {title} ({authors})")
        tables: dict[str, list[PaperRow]] = {}
        for row in paper_rows().values():
            if row.id.startswith(f"{paper}/"):
                tables.setdefault(row.id.split("/")[1], []).append(row)
        for number, members in tables.items():
            parts.append(f"### {number}: {members[0].caption}\n\n{_row_table(members)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _data_table() -> str:
    """Return a table of the data sets: folder below --data, title, files with their origins."""
    lines = []
    for name, data in datasets().items():
        files = "; ".join(f"`{path}` ({origin})" for path, origin in data.files.items())
        lines.append([f"`{data.folder or name}`", data.title, files])
    return markdown_table(["folder", "data set", "files"], lines, left=3)


def _row_table(members: list[PaperRow]) -> str:
    lines = [
        [f"`{row.id.rpartition('/')[2]}`", _describe_system(row), "<br>".join(row_numbers(row))] for row in members
    ]
    return markdown_table(["row", "config", "the paper's numbers"], lines, left=3)


def _describe_system(row: PaperRow) -> str:
    """Return the config of a row with the keys that it changes, or the reason why the row is not run."""
    notes = [row.note] if row.note else []
    if row.same_as:
        return "; ".join([f"as `{row.same_as}`", *notes])
    if row.reason:
        return f"not run: {row.reason}"
    configs = [row.config] if isinstance(row.config, str) else list(dict.fromkeys(row.config.values()))
    parts = [f"`{config}`" for config in configs if config]
    parts += [f"`{key}={flag_text(value)}`" for key, value in row.set.items()]
    if row.verb == "recipe":
        parts.append(f"`jaxret recipe`, {row.stage}" + (f", after `{row.warm_up}`" if row.warm_up else ""))
    if row.chunks:
        parts.append(f"`jaxret data chunk --{row.chunks}`")
    if row.verb == "bm25":
        parts.insert(0, "`jaxret bm25`")
    if row.seeds > 1 and row.verb != "bm25":
        parts.append(f"{row.seeds} seeds")
    return "; ".join([", ".join(parts) or "`jaxret data check`", *notes])


if __name__ == "__main__":
    print(page(), end="")
