"""Training examples and corpora as token stores: tokenized once, then read by every job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location
from jaxret.data.formats import Corpus, CorpusScan, Policy, QuerySource, TrainingSource, parse_source, source_path
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.records import Example, Passage
from jaxret.data.tokens.batches import TrainingSet, tokenize_examples
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.data.tokens.store import (
    ColumnWriter,
    StaleError,
    StoreOrigin,
    Strings,
    StringsBuilder,
    TokenStore,
    open_or_make_store,
    open_store,
)
from jaxret.data.tokens.teacher_scores import TeacherScores, with_scores
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation
from jaxret.types import Log, Ragged


@dataclass(frozen=True)
class ExampleSource:
    """Source of training examples: the arguments of `TrainingSource.open`, pseudo-queries and teacher scores."""

    path: str  # Data set
    split: str  # Split of the data set
    on_error: str  # Policy for bad records
    negatives_run: str = ""  # TREC run to take hard negatives from; "": the data have them
    pseudo_queries: str = ""  # File of pseudo-queries; "": none
    scores: bool = False  # Whether teacher scores are stored with the examples
    teacher_run: str = ""  # TREC run with the teacher's scores; "": the records have them

    @cached_property
    def data(self) -> TrainingSource:
        """The opened examples. Raises DataError if there are none."""
        return TrainingSource.open(self.path, self.split, self.negatives_run)

    @cached_property
    def pseudo_query_data(self) -> QuerySource:
        """The opened pseudo-queries. Raises DataError if there are none."""
        return QuerySource.open(self.pseudo_queries)

    @cached_property
    def teacher_data(self) -> RankingSource:
        """The opened run of the teacher. Raises DataError if it has no rankings."""
        return RankingSource.open(self.teacher_run)

    def extra_files(self) -> list[Path]:
        """Return the files of pseudo-queries and of the teacher's run.

        Raises DataError for a missing file, and for a teacher's run without scores.
        """
        files: list[Path] = []
        if self.pseudo_queries:
            files += self.pseudo_query_data.files
        if self.teacher_run:
            self.teacher_data.require_scores("a teacher's scores")
            files += self.teacher_data.files
        return files

    def files(self) -> list[Path]:
        """Return all source files. Raises DataError as `extra_files` does."""
        return [*self.data.files, *self.extra_files()]

    def origin(self, tokenizer: TextTokenizer) -> StoreOrigin:
        """Return the origin of the store of these examples. Raises DataError as `extra_files` does."""
        settings = {
            "split": self.split,
            "on_error": self.on_error,
            "negatives_run": bool(self.negatives_run),
            "pseudo_queries": bool(self.pseudo_queries),
            "tokens": tokenizer.settings("query", "passage"),
            "known_positives": "sets",
            # No key without scores, so that stores without scores keep their settings.
            **({"scores": "run" if self.teacher_run else "passages"} if self.scores else {}),
            **_format_entry(
                path=self.path,
                negatives_run=self.negatives_run,
                pseudo_queries=self.pseudo_queries,
                teacher_run=self.teacher_run,
            ),
        }
        return StoreOrigin(f"{self.data.data.name}.{self.split}", tuple(self.files()), settings)


def _format_entry(**sources: str | Path) -> dict[str, Any]:
    """Return the setting of a store for forced formats, or {} if no format was forced."""
    names = {key: name for key, source in sources.items() if (name := parse_source(source)[0])}
    return {"formats": names} if names else {}


def load_or_tokenize_examples(
    source: ExampleSource, tokenizer: TextTokenizer, root: Path, progress: bool, log: Log
) -> tuple[TrainingSet, str]:
    """Return tokenized examples, memory-mapped, and the report of bad records. Raises DataError.

    Args:
        source: data to read.
        tokenizer: tokenizer with the length limits.
        root: folder of all stores.
        log: function for messages about the store.
    """

    def make(writer: ColumnWriter) -> dict[str, Any]:
        policy = Policy(source.on_error)
        examples = source.data.read(policy)
        if not examples:
            split = f" of the split {source.split!r}" if source.data.is_folder else ""
            problem = f"it has no training example{split}{policy.report() and f' ({policy.report()})'}"
            remedy = "an example is a query with a relevant passage: give a file or a split with some (docs/data.md)"
            raise Location(source_path(source.path)).error("no examples", problem, remedy)
        if source.teacher_run:
            examples = add_run_scores(examples, source.teacher_data, source.path, policy)
        if source.scores and TeacherScores.from_examples(examples) is None:
            location = Location(source_path(source.teacher_run or source.path))
            problem = "no example has a teacher's scores of its target and of a negative"
            remedy = "give data with scores, or a run with scores as data.teacher_run, or learn without a teacher"
            raise location.error("no scores", problem, remedy)
        pseudo_queries = None
        if source.pseudo_queries:
            pseudo_queries = {query.id: query.text for query in source.pseudo_query_data.read(policy)}
        data = tokenize_examples(examples, tokenizer, progress, pseudo_queries, write_column=writer.ragged)
        writer.array("positives", data.positives)
        writer.array("known_positives", data.known_positives.rows)
        writer.ragged("known_positive_sets", [data.known_positives.sets])
        writer.ragged("negatives", [data.negatives])
        writer.strings("query_ids", StringsBuilder(data.query_ids).strings())
        if source.scores:
            assert data.teacher is not None
            writer.array("positive_scores", data.teacher.positives)
            writer.array("negative_scores", data.teacher.negatives.flat)
        cut = [asdict(truncation) for truncation in data.truncations]
        return {"digest": data.digest, "truncations": cut, "report": policy.report()}

    store = open_or_make_store(source.origin(tokenizer), root, make, log)
    return _training_set(store, tokenizer, source), store.facts["report"]


def add_run_scores(examples: Iterable[Example], run: RankingSource, data: str, policy: Policy) -> list[Example]:
    """Return the examples with the scores of a run. Ids of queries and passages join the two.

    Args:
        examples: the examples.
        run: rankings with scores.
        data: name of the examples' data set, for the error.

    Raises:
        DataError: the run has another text for a query id. This happens if ids are row numbers of different files.
    """
    run_lines = run.read_ranked(policy)

    def add_scores(example: Example) -> Example:
        query, lines = example.query, run_lines.get(example.query.id, [])
        if lines and (text := lines[0].query_text) and text != query.text:
            problem = f"query {query.id} is {text[:60]!r} in this run and {query.text[:60]!r} in {data}"
            raise lines[0].location.error("another question", problem, "give a run with scores of these queries")
        return with_scores(example, {line.passage_id: line.score for line in lines})

    return list(map(add_scores, examples))


def _training_set(store: TokenStore, tokenizer: TextTokenizer, source: ExampleSource) -> TrainingSet:
    teacher = None
    if source.scores:
        negatives = Ragged(store.columns["negative_scores"], store.ragged("negatives").offsets)
        teacher = TeacherScores(store.columns["positive_scores"], negatives)
    return TrainingSet(
        queries=store.ragged("queries"),
        passages=store.ragged("passages"),
        positives=store.columns["positives"],
        known_positives=KnownPositives(store.ragged("known_positive_sets"), store.columns["known_positives"]),
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
    """Tokens of a corpus, memory-mapped."""

    ids: Strings  # Ids of the passages
    passages: Ragged  # Token ids of the passages
    scan: CorpusScan  # Scan of the text that was tokenized
    truncation: Truncation  # Counts of texts and tokens that the length limit cut
    report: str  # Report of bad records


def load_tokenized_corpus(
    corpus: Corpus, policy: Policy, tokenizer: TextTokenizer, root: Path
) -> TokenizedCorpus | None:
    """Return the tokens of a corpus from its store, or None if no valid store exists.

    Args:
        corpus: corpus to load.
        policy: policy for bad records; it is one of the store's settings.
        tokenizer: tokenizer; its settings are settings of the store.
        root: folder of all stores.

    Raises:
        DataError: the corpus does not exist.
    """
    with contextlib.suppress(StaleError):
        return _corpus_of_store(open_store(_corpus_origin(corpus, policy, tokenizer), root), corpus)
    return None


def load_or_tokenize_corpus(
    corpus: Corpus, scan: CorpusScan, policy: Policy, tokenizer: TextTokenizer, root: Path, progress: bool, log: Log
) -> TokenizedCorpus:
    """Return the tokens of a scanned corpus. Raises DataError if the corpus has changed since the scan.

    Args:
        corpus: corpus to tokenize.
        scan: result of the scan of this corpus.
        policy: policy for bad records, which has their report after the scan.
        tokenizer: tokenizer with the length limits.
        root: folder of all stores.
        log: function for messages about the store.
    """

    def make(writer: ColumnWriter) -> dict[str, Any]:
        ids = StringsBuilder()

        def note_ids(passages: Iterator[Passage]) -> Iterator[Passage]:
            for passage in passages:
                ids.append(passage.id)
                yield passage

        cut = Truncation("passages", tokenizer.passage_length)
        passages = corpus.read(Policy(policy.on_error), scan)
        tokenizer.passages(note_ids(passages), progress, cut, lambda blocks: writer.ragged("passages", blocks))
        writer.strings("ids", ids.strings())
        return {"sha256": scan.sha256, "truncation": asdict(cut), "report": policy.report()}

    return _corpus_of_store(open_or_make_store(_corpus_origin(corpus, policy, tokenizer), root, make, log), corpus)


def _corpus_origin(corpus: Corpus, policy: Policy, tokenizer: TextTokenizer) -> StoreOrigin:
    formats = {"formats": {"corpus": corpus.data.format_name}} if corpus.data.format_name else {}
    settings = {"on_error": policy.on_error, "tokens": tokenizer.settings("passage"), **formats}
    return StoreOrigin(corpus.name, corpus.files, settings)


def _corpus_of_store(store: TokenStore, corpus: Corpus) -> TokenizedCorpus:
    """Return the tokens of a corpus from its open store."""
    ids, facts = store.strings("ids"), store.facts
    scan = CorpusScan(len(ids), facts["sha256"], stat=corpus.stat())
    return TokenizedCorpus(ids, store.ragged("passages"), scan, Truncation(**facts["truncation"]), facts["report"])
