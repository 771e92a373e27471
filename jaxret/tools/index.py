"""What `jaxret index` does: an approximate index of an encoded corpus, built, measured and told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.formats import Policy
from jaxret.retrieval.approximate import (
    check_index_file,
    identity_of,
    index_folder,
    load,
    read_index_manifest,
    require_one_query_vector,
)
from jaxret.retrieval.approximate_build import Questions, build, default_efforts, measure, passages_as_questions
from jaxret.retrieval.encoded import EncodedCorpus, open_encoded
from jaxret.retrieval.factory import effort_of, make_index
from jaxret.retrieval.retrieve import corpus_folder, open_corpus
from jaxret.retrieval.shards import ShardError
from jaxret.runs.lock import hold
from jaxret.runs.run import Run
from jaxret.runs.workdir import Workdir
from jaxret.tools.asked import read_asked


def index_corpus(
    workdir: Workdir,
    factory: str,
    corpus: str = "",
    name: str = "",
    run: Run | None = None,
    queries: str = "",
    qrels: str = "",
    split: str = "test",
    sample: int = 1000,
    candidates: int = 200,
    nprobe: Sequence[int] = (),
    ef_search: Sequence[int] = (),
    train_vectors: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Builds an index of an encoded corpus, unless it is there, and measures its recall with `sample` of the queries,
    which `run` encodes, or with as many passages; the folder of the index. name: by default the factory string."""
    folder = corpus_folder(workdir, corpus)
    place = index_folder(folder, name or factory)
    there = open_corpus(run, folder) if run else open_encoded(folder)
    require_one_query_vector(there)
    empty = make_index(factory, there.dimension)  # what is wrong with what was asked is told before anything is built
    if there.total_rows < 2:
        raise ValueError(f"{folder} has {there.total_rows} of its passages left: an index needs two at least")
    _require_efforts(empty, factory, {"nprobe": nprobe, "ef_search": ef_search})
    asked = _questions(run, queries, qrels, split, sample)
    with hold(place, "indexing"):
        if not _is_there(place, there, factory, train_vectors, seed):
            build(there, place, factory, train_vectors, seed, print, progress)
        manifest = read_index_manifest(place)
        asked = asked or passages_as_questions(there, sample, seed)
        index = load(place / "index.faiss", manifest)
        efforts = sorted({*nprobe, *ef_search}) or default_efforts(index, candidates)
        print(f"recall of exact search, with {len(asked.vectors):,} {asked.source}:")
        recall = measure(there, place, manifest, asked, efforts, candidates, progress)
    print("\n".join(table(recall, effort_of(index)[0])))
    print(f"{place}: search it with --index={place.name} (without, search is exact)")
    return place


def _is_there(place: Path, corpus: EncodedCorpus, factory: str, train_vectors: int, seed: int) -> bool:
    """Whether this index was built already, of these vectors. Raises ValueError if the name is another index's."""
    try:
        found = read_index_manifest(place)
        check_index_file(place, found)
    except (FileNotFoundError, ShardError):
        return False
    if found["factory"] != factory:
        raise ValueError(f"{place} is an index {found['factory']}; choose another --name for {factory}, or delete it")
    if found["corpus"] != identity_of(corpus):
        print(f"{place} is of other vectors than the corpus has now: it is built again")
        return False
    if (found["training"]["asked"], found["training"]["seed"]) != (train_vectors, seed):
        print(f"{place} was trained on another sample: it is built again")
        return False
    print(f"{place} was built already")
    return True


def _require_efforts(index: Any, factory: str, given: dict[str, Sequence[int]]) -> None:
    name, most = effort_of(index)
    for flag, values in given.items():
        if values and flag != name:
            raise ValueError(f"--{flag}: the index {factory} has none; {f'it has {name}' if name else 'leave it out'}")
        if wrong := [value for value in values if value < 1 or (name == "nprobe" and value > most)]:
            raise ValueError(f"--{flag}={wrong[0]}: {f'1 to {most} are' if name == 'nprobe' else '1 or more is'} right")


def _questions(run: Run | None, queries: str, qrels: str, split: str, sample: int) -> Questions | None:
    """Vectors of up to `sample` of the queries, evenly spread; None if none are given."""
    if run is None:
        return None
    asked = read_asked(queries, qrels, split, Policy("error")).queries
    places = np.unique(np.linspace(0, len(asked) - 1, min(sample, len(asked))).astype(int))
    tokens = run.tokenizer.queries([asked[place].text for place in places])
    vectors = run.embedder()(tokens, "query").stacked()[:, 0]
    return Questions(np.ascontiguousarray(vectors, np.float32), f"questions of {queries}")


def table(recall: dict[str, Any], effort: str) -> list[str]:
    """What was measured, a line a setting; * is what a search takes unless it says otherwise."""
    depths = list(recall["measured"][0]["recall"])
    heads = [*([effort] if effort else []), "candidates", *(f"recall@{depth}" for depth in depths), "ms a question"]
    lines = ["  " + "  ".join(f"{head:>{max(10, len(head))}}" for head in heads)]
    for row in recall["measured"]:
        cells = [*([f"{row['effort']}"] if effort else []), f"{row['candidates']}"]
        cells += [f"{row['recall'][depth]:.4f}" for depth in depths] + [f"{row['ms']:.2f}"]
        kept = {"candidates": row["candidates"], "effort": row["effort"]} == recall["chosen"]
        aligned = (f"{cell:>{max(10, len(head))}}" for cell, head in zip(cells, heads, strict=True))
        lines.append(("* " if kept else "  ") + "  ".join(aligned))
    return lines
