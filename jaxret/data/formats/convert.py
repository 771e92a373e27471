"""Conversion of formats. Records are read and written, and values that the new format cannot hold are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.dataset import FullDataSet, open_data_set
from jaxret.data.formats.detect import FORMATS_BY_NAME
from jaxret.data.formats.format import ROLES
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.formats.roles import open_role
from jaxret.data.formats.sources import TrainingSource
from jaxret.data.formats.writers import WRITERS, Losses, write_beir
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Query
from jaxret.storage.transaction import new_folder

_ENDINGS = ("parquet", "jsonl", "json", "tsv", "csv", "gz", "zst")  # endings of the written file, which are not formats


@dataclass
class Conversion:
    """The counts of a conversion."""

    source: str  # The source and its format, in words
    records: dict[str, int] = field(default_factory=dict)  # File -> records in it
    # Kind of information that the written format cannot hold -> how often
    losses: Losses = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} in {name}" for name, count in self.records.items())
        losses = "; ".join(f"{count:,} {kind}" for kind, count in self.losses.items() if count)
        return f"{self.source}: {counts or 'nothing'}{f'; not held: {losses}' if losses else ''}"


def convert_data(
    source: DataSource,
    destination: PathLike,
    name: str,
    split: str = "train",
    role: str = "",
    policy: Policy | None = None,
) -> Conversion:
    """Write a source in another format, or as a folder in another format.

    Args:
        source: a folder, file or named set.
        destination: the file to write, or the folder, which must not exist: a reader of a folder that has files of two
            sets would mix them.
        name: a format of `WRITERS`, or a folder of `FOLDERS`.
        split: split of a folder; for a training file, the name of its split in a written folder.
        role: role of the source to write; "": the first role for which the format has a writer.
        policy: what to do with bad records; by default an error.

    Raises:
        ValueError: the format cannot be written, the source does not hold the role, or the output is a file of it.
        FileExistsError: the folder to write exists and is not empty.
        DataError: a bad record, or no record.
    """
    policy = policy or Policy()
    if name in FOLDERS:
        with new_folder(Path(destination)) as folder:
            conversion = FOLDERS[name](folder, open_data_set(source, split, policy))
            if not any(conversion.records.values()):
                raise no_records_error(source.path, policy)
            if not source.is_folder and source.file().format.gives("rankings"):
                conversion.losses["queries' rankings"] = len(RankingSource.of(source).read(policy))
            return conversion
    if name not in WRITERS:
        if name in _ENDINGS:
            raise ValueError(
                f"--to={name}: that is an ending, not a format: end {destination} in .{name}, and give as --to a "
                "format, such as beir.texts for passages or tevatron.examples for training data"
            )
        names = ", ".join((*FOLDERS, *WRITERS))
        raise ValueError(f"--to={name}: that is not a format that can be written; it must be one of {names}")
    gives = source.file().format.roles() if not source.is_folder else [r for r in ROLES[:4] if _has(source, r, split)]
    require_other_output(destination, [("what is converted", source)], [split])
    for own_role, write in WRITERS[name].items():
        if own_role in gives and role in ("", own_role):
            data = open_role(source, own_role, split)
            records: Any = data.read(policy, targets=False) if isinstance(data, TrainingSource) else data.read(policy)
            items = records if isinstance(records, dict) else CountedRecords(records)
            if not items:
                raise no_records_error(source.path, policy)
            losses = write(Path(destination), items)
            if isinstance(data, TrainingSource):
                losses += _changed_targets(records, not data.first_target_only, FORMATS_BY_NAME[name].every_positive)
            if isinstance(data, RankingSource) and data.without_scores:
                losses["scores"], losses[_RANKS_ALONE] = 0, 0 if name == "msmarco.run" else len(items)
            return Conversion(data.describe(), {str(destination): len(items)}, losses)
    roles = " or ".join(own_role for own_role in WRITERS[name] if role in ("", own_role)) or role
    raise ValueError(f"{source} gives {', '.join(gives) or 'nothing'}, but {name} is written from {roles}")


def no_records_error(path: Path, policy: Policy) -> DataError:
    """Return the error for a source without records, or without good ones."""
    report = policy.report() and f" ({policy.report()})"
    return Location(path).error("no records", f"there are no records in it{report}", "give data with some")


class CountedRecords:
    """Records that are counted while they are written. Its length is their number so far. It is false if there is no
    record."""

    def __init__(self, records: Iterable[Any]) -> None:
        iterator = iter(records)
        first = list(islice(iterator, 1))
        self._count, self._is_empty, self._records = 0, not first, chain(first, iterator)

    def __bool__(self) -> bool:
        return not self._is_empty

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for record in self._records:
            self._count += 1
            yield record


def _has(source: DataSource, role: str, split: str) -> bool:
    try:
        open_role(source, role, split).describe()
    except ValueError:
        return False
    return True


# Folders


@dataclass
class _Folder:
    """Writes files into a folder one after the other, and counts records and losses."""

    folder: Path
    conversion: Conversion

    def write(self, file: str, name: str, role: str, values: Iterable[Any]) -> None:
        records = CountedRecords(values)
        self.conversion.losses += WRITERS[name][role](self.folder / file, records)
        self.conversion.records[file] = len(records)


def _beir(folder: Path, data: FullDataSet) -> Conversion:
    queries, judgements_by_split = data.queries(None), {split: data.judgements(split) for split in data.splits}
    passages = CountedRecords(data.passages())
    write_beir(folder, passages, queries, judgements_by_split)
    counts = {f"qrels/{split}.tsv": len(judgements) for split, judgements in judgements_by_split.items()}
    conversion = Conversion(data.source, {"corpus.jsonl": len(passages), "queries.jsonl": len(queries), **counts})
    conversion.losses += _lost_training(data, judgements_by_split)
    return conversion


def _msmarco(folder: Path, data: FullDataSet) -> Conversion:
    target = _Folder(folder, Conversion(data.source))
    target.write("collection.tsv", "msmarco.texts", "passages", data.passages())
    judgements_by_split = {split: data.judgements(split) for split in data.splits}
    for split, judgements in judgements_by_split.items():
        target.write(f"queries.{split}.tsv", "msmarco.texts", "queries", _judged_queries(data, split, judgements))
        target.write(f"qrels.{split}.tsv", "trec.qrels", "judgements", judgements)
    target.conversion.losses += _lost_queries(data, judgements_by_split) + _lost_training(data, judgements_by_split)
    return target.conversion


def _tevatron(folder: Path, data: FullDataSet) -> Conversion:
    target = _Folder(folder, Conversion(data.source))
    target.write("corpus.jsonl", "tevatron.corpus", "passages", data.passages())
    target.write("queries.jsonl", "tevatron.queries", "queries", data.queries(None))
    for split in data.splits:
        examples = data.examples(split)
        target.write(f"{split}.jsonl", "tevatron.named", "examples", examples)
        target.conversion.losses += _changed_targets(examples, _every_positive(data, split), True)
        target.conversion.losses += _lost_judgements(data.judgements(split), examples)
    return target.conversion


def _dpr(folder: Path, data: FullDataSet) -> Conversion:
    target = _Folder(folder, Conversion(data.source))
    target.write("psgs.tsv", "dpr.passages", "passages", data.passages())
    judgements_by_split = {split: data.judgements(split) for split in data.splits}
    for split, judgements in judgements_by_split.items():
        examples = data.examples(split)
        target.write(f"{split}.qa.csv", "dpr.queries", "queries", _judged_queries(data, split, judgements))
        counts = {kind: target.conversion.losses[kind] for kind in ("queries' ids", "queries' instructions")}
        target.write(f"{split}.json", "dpr.examples", "examples", examples)
        for kind, count in counts.items():  # counts of the same queries, not of new ones
            target.conversion.losses[kind] = count
        target.conversion.losses += _lost_judgements(judgements, examples)
        target.conversion.losses += _changed_targets(examples, _every_positive(data, split), False)
    target.conversion.losses += _lost_queries(data, judgements_by_split)
    return target.conversion


def _judged_queries(data: FullDataSet, split: str, judgements: Iterable[Judgement]) -> list[Query]:
    ids = {judgement.query_id for judgement in judgements}
    return [query for query in data.queries(split) if query.id in ids]


# Parts of a data set that a folder does not hold


def _lost_queries(data: FullDataSet, judgements_by_split: Mapping[str, list[Judgement]]) -> Losses:
    """Return queries that are in no split: a folder with a file of queries for each split cannot hold them."""
    if data.queries_by_split:
        all_queries = [(query.id, split) for split in data.splits for query in data.queries(split)]
        judged_queries = {
            (entry.query_id, split) for split, judgements in judgements_by_split.items() for entry in judgements
        }
        return Counter({_UNJUDGED_QUERIES: len(set(all_queries) - judged_queries)})
    judged_ids = {entry.query_id for judgements in judgements_by_split.values() for entry in judgements}
    return Counter({_UNJUDGED_QUERIES: sum(query.id not in judged_ids for query in data.queries(None))})


def _lost_training(data: FullDataSet, judgements_by_split: Mapping[str, list[Judgement]]) -> Losses:
    """Count losses of training records in a folder with judgements only: scores, targets, and pairs that the judgements
    lack."""
    losses: Losses = Counter()
    for split in data.splits_with_examples:
        pairs = {(judgement.query_id, judgement.passage_id) for judgement in judgements_by_split[split]}
        examples = data.examples(split)
        losses += _changed_targets(examples, _every_positive(data, split), True)
        for example in examples:
            losses["scores"] += example.score_count
            losses["passages of training records that nobody judged"] += sum(
                (example.query.id, passage.id) not in pairs for passage in (*example.positives, *example.negatives)
            )
    return losses


def _lost_judgements(judgements: Iterable[Judgement], examples: Iterable[Example]) -> Losses:
    """Count the losses of judgements in a folder with training records only: grades, and judgements whose query and
    passage are in no record."""
    pairs = {
        (example.query.id, passage.id) for example in examples for passage in (*example.positives, *example.negatives)
    }
    entries = [(judgement, (judgement.query_id, judgement.passage_id) in pairs) for judgement in judgements]
    return Counter(
        {
            "grades above 1": sum(judgement.relevance > 1 for judgement, is_held in entries if is_held),
            "judgements of what is in no training record": sum(not is_held for _, is_held in entries),
        }
    )


def _every_positive(data: FullDataSet, split: str) -> bool:
    return data.every_positive or split not in data.splits_with_examples  # judgements make an example of each positive


def _changed_targets(examples: Iterable[Example], every_positive: bool, every_positive_written: bool) -> Losses:
    """Count records with several positives, if the source and the written file differ in their targets. The two
    arguments say whether each positive is a target in them, or only the first one, see `Format`."""
    kind = _EACH_A_TARGET if every_positive_written else _FIRST_A_TARGET
    changes = every_positive != every_positive_written
    return Counter({kind: sum(len(example.positives) > 1 for example in examples) if changes else 0})


_EACH_A_TARGET = "first positives as the only targets of records (now every positive is one; tevatron.first keeps them)"
_FIRST_A_TARGET = "further positives as targets of records (now only the first is a target)"
_UNJUDGED_QUERIES = "queries without judgements"
_RANKS_ALONE = "scores of queries, which the source lacks: 1 / rank is written"
FOLDERS: dict[str, Callable[[Path, FullDataSet], Conversion]] = {
    "beir": _beir,
    "msmarco": _msmarco,
    "tevatron": _tevatron,
    "dpr": _dpr,
}
