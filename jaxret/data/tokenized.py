"""Training examples and corpora as stores of tokens: tokenised once, whoever asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxret.data.batches import TrainingSet, tokenize_examples
from jaxret.data.files import Where, missing_file
from jaxret.data.formats import (
    CorpusScan,
    Policy,
    called,
    corpus_file,
    example_files,
    exists,
    files_of,
    found_queries,
    read_corpus,
    read_examples,
    read_queries,
    run_files,
    source_path,
    split_source,
    stat_corpus,
)
from jaxret.data.formats.readers import ranked_lines, require_scores
from jaxret.data.records import Example, Passage
from jaxret.data.store import Origin, Say, StaleError, Store, Strings, StringsBuilder, Writer, open_store, stored
from jaxret.data.teacher import Teacher, scored_by
from jaxret.data.tokenizer import TextTokenizer, Truncation
from jaxret.types import Ragged


@dataclass(frozen=True)
class ExampleSource:
    """Where training examples come from: what `read_examples` is given, and a file of pseudo-queries ("": none).
    scores: whether a teacher's scores are kept with them: those of the records, or of the run `teacher_run`."""

    path: str
    split: str
    on_error: str
    negatives_run: str = ""
    pseudo_queries: str = ""
    scores: bool = False
    teacher_run: str = ""

    def beside(self) -> list[Path]:
        """The files that belong to the examples. Raises DataError for one that is missing, and for a teacher's run that
        has no scores."""
        files: list[Path] = []
        if self.pseudo_queries:
            path = source_path(self.pseudo_queries)
            if not exists(path):
                raise missing_file(path)
            files += [file for found in found_queries(self.pseudo_queries) for file in files_of(found.path)]
        if self.teacher_run:
            require_scores(self.teacher_run, "a teacher's scores")
            files += run_files(self.teacher_run)
        return files

    def files(self) -> list[Path]:
        """All of them. Raises what `beside` does."""
        return [*example_files(self.path, self.split, self.negatives_run or None), *self.beside()]

    def origin(self, tokenizer: TextTokenizer) -> Origin:
        """Raises what `beside` does."""
        recipe = {
            "split": self.split,
            "on_error": self.on_error,
            "negatives_run": bool(self.negatives_run),
            "pseudo_queries": bool(self.pseudo_queries),
            "tokens": tokenizer.recipe("query", "passage"),
            # Tokens that were kept without them stay valid.
            **({"scores": "run" if self.teacher_run else "passages"} if self.scores else {}),
            **_forced(
                path=self.path,
                negatives_run=self.negatives_run,
                pseudo_queries=self.pseudo_queries,
                teacher_run=self.teacher_run,
            ),
        }
        return Origin(f"{called(self.path)}.{self.split}", tuple(self.files()), recipe)


def _forced(**sources: str | Path) -> dict[str, Any]:
    """What a recipe holds of formats that were forced: nothing if none was."""
    names = {key: name for key, source in sources.items() if (name := split_source(source)[0])}
    return {"formats": names} if names else {}


def stored_examples(
    source: ExampleSource, tokenizer: TextTokenizer, root: Path, progress: bool, say: Say
) -> tuple[TrainingSet, str]:
    """Tokenised examples, memory-mapped, and what was said of bad records when they were read. Raises DataError."""

    def make(writer: Writer) -> dict[str, Any]:
        policy = Policy(source.on_error)
        examples = read_examples(source.path, source.split, policy, negatives_run=source.negatives_run or None)
        if source.teacher_run:
            examples = taught_by_run(examples, source.teacher_run, source.path, policy)
        if source.scores and Teacher.of(examples) is None:
            where = Where(source_path(source.teacher_run or source.path))
            found = "no example has a teacher's scores, of its target and of a negative"
            remedy = "give data with scores, or a run that has them as data.teacher_run, or learn without a teacher"
            raise where.error("no scores", found, remedy)
        imagined = None
        if source.pseudo_queries:
            imagined = {query.id: query.text for query in read_queries(source.pseudo_queries, policy)}
        data = tokenize_examples(examples, tokenizer, progress, imagined, keep=writer.ragged)
        writer.array("positives", data.positives)
        writer.array("known_positives", data.known_positives)
        writer.ragged("negatives", [data.negatives])
        writer.strings("query_ids", StringsBuilder(data.query_ids).strings())
        if source.scores:
            assert data.teacher is not None
            writer.array("positive_scores", data.teacher.positives)
            writer.array("negative_scores", data.teacher.negatives.flat)
        cut = [asdict(truncation) for truncation in data.truncations]
        return {"digest": data.digest, "truncations": cut, "report": policy.report()}

    store = stored(source.origin(tokenizer), root, make, say)
    return _training_set(store, tokenizer, source), store.facts["report"]


def taught_by_run(examples: Iterable[Example], run: str, data: str, policy: Policy) -> list[Example]:
    """The examples with a run's scores, by ids of queries and passages. Raises DataError if it has other questions
    under their ids, as results without ids do: both count their rows."""
    ranked = ranked_lines(run, policy)

    def scored(example: Example) -> Example:
        query, lines = example.query, ranked.get(example.query.id, [])
        if lines and (text := lines[0].query_text) and text != query.text:
            told = f"its query {query.id} is {text[:60]!r}, but that of {data} is {query.text[:60]!r}"
            raise lines[0].where.error("another question", told, "give scores of these queries: rows are counted alike")
        return scored_by(example, {line.passage_id: line.score for line in lines})

    return list(map(scored, examples))


def _training_set(store: Store, tokenizer: TextTokenizer, source: ExampleSource) -> TrainingSet:
    teacher = None
    if source.scores:
        negatives = Ragged(store.columns["negative_scores"], store.ragged("negatives").offsets)
        teacher = Teacher(store.columns["positive_scores"], negatives)
    return TrainingSet(
        queries=store.ragged("queries"),
        passages=store.ragged("passages"),
        positives=store.columns["positives"],
        known_positives=store.columns["known_positives"],
        negatives=store.ragged("negatives"),
        query_ids=store.strings("query_ids"),
        pad_id=tokenizer.pad_id,
        marker_ids=tokenizer.marker_ids,
        digest=store.facts["digest"],
        pseudo_queries=store.ragged("pseudo_queries") if source.pseudo_queries else None,
        truncations=tuple(Truncation(**cut) for cut in store.facts["truncations"]),
        teacher=teacher,
    )


@dataclass(frozen=True)
class TokenizedCorpus:
    """A corpus as tokens, memory-mapped. `scan` is that of the text they were made from."""

    ids: Strings  # of the passages
    passages: Ragged
    scan: CorpusScan
    truncation: Truncation
    report: str  # of bad records


def find_corpus(corpus: str | Path, policy: Policy, tokenizer: TextTokenizer, root: Path) -> TokenizedCorpus | None:
    """The corpus, if it was tokenised before and is the same now. Raises DataError if there is none."""
    with contextlib.suppress(StaleError):
        return _tokenized(open_store(_corpus_origin(corpus, policy, tokenizer), root), corpus)
    return None


def stored_corpus(
    corpus: str | Path, scan: CorpusScan, policy: Policy, tokenizer: TextTokenizer, root: Path, progress: bool, say: Say
) -> TokenizedCorpus:
    """The corpus that was scanned, under `policy`, as tokens. Raises DataError if it is not the one that was."""

    def make(writer: Writer) -> dict[str, Any]:
        ids = StringsBuilder()

        def noting(passages: Iterator[Passage]) -> Iterator[Passage]:
            for passage in passages:
                ids.append(passage.id)
                yield passage

        cut = Truncation("passages", tokenizer.passage_length)
        passages = read_corpus(corpus, Policy(policy.on_error), scan)
        tokenizer.passages(noting(passages), progress, cut, lambda blocks: writer.ragged("passages", blocks))
        writer.strings("ids", ids.strings())
        return {"sha256": scan.sha256, "truncation": asdict(cut), "report": policy.report()}

    return _tokenized(stored(_corpus_origin(corpus, policy, tokenizer), root, make, say), corpus)


def _corpus_origin(corpus: str | Path, policy: Policy, tokenizer: TextTokenizer) -> Origin:
    recipe = {"on_error": policy.on_error, "tokens": tokenizer.recipe("passage"), **_forced(corpus=corpus)}
    return Origin(called(corpus), files_of(corpus_file(corpus)), recipe)


def _tokenized(store: Store, corpus: str | Path) -> TokenizedCorpus:
    """What a store of a corpus holds."""
    ids, facts = store.strings("ids"), store.facts
    scan = CorpusScan(len(ids), facts["sha256"], stat=stat_corpus(corpus))
    return TokenizedCorpus(ids, store.ragged("passages"), scan, Truncation(**facts["truncation"]), facts["report"])
