"""Pseudo-queries of a corpus from a T5 model, in a folder that any number of jobs fill. Jobs can be killed and started
again; the bytes are always the same.

<out>/generation.json         everything that the queries depend on, with a digest
<out>/parts/0000012.json      queries of `part_rows` passages, with a digest
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from jaxret.data.formats import Corpus, CorpusScan, Policy
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.mining.generation_options import GenerationOptions
from jaxret.mining.generation_outputs import OUTPUT_CORPORA, OUTPUTS, GeneratedQueries
from jaxret.models.encoders.weight_files import weight_files
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.parallel.mesh import make_mesh
from jaxret.parallel.progress import Progress, print_line
from jaxret.runs.query_generator import QueryGenerator, open_query_generator
from jaxret.storage.atomic import read_with_digest, sha256_file, sha256_json, with_digest, write_json
from jaxret.storage.buckets.bucket_leases import LAST, open_leases
from jaxret.storage.folder_kinds import GENERATED, require_folder_kind
from jaxret.storage.leases import Lease, Leases

_PAUSE = 0.5  # seconds between two reads of the state of other jobs
GENERATION_FILE, PARTS = "generation.json", "parts"


@dataclass(frozen=True)
class GenerationResult:
    """Counts of a call of `generate_queries`."""

    passages: int
    with_queries: int
    queries: int
    parts: int
    parts_written: int  # parts that this job wrote; the others existed, or other jobs wrote them
    programs: int  # number of compiled programs
    files: tuple[Path, ...]  # outputs


def generate_queries(
    model: str | Path,
    corpus: Corpus,
    out: str | Path,
    decoding: DecodingOptions = DecodingOptions(),
    options: GenerationOptions = GenerationOptions(),
) -> GenerationResult:
    """Generate queries for every passage of a corpus, and write the files that `options.write` names.

    Any number of jobs may do this at the same time. Each takes parts that no other job has, and the parts of dead jobs.
    With the same settings, more files can be written later without generating again.

    Args:
        model: Hugging Face directory of a T5 with its decoder (T5, Flan-T5, doc2query) and its tokenizer.
        corpus: corpus whose passages get queries.
        out: folder to write.
        options: how passages are read, and what is written.

    Raises:
        DataError: a bad record.
        FileNotFoundError: the model has no weights.
        ValueError: weights, tokenizer or prompt do not fit, there is no passage, the folder holds queries of other
            settings, or an output is a file of the corpus.
    """
    if not Path(model).is_dir():
        raise FileNotFoundError(
            f"--model={model} is not a folder; `hf download NAME --local-dir FOLDER` fetches a model, and "
            "--model=FOLDER reads it"
        )
    policy = Policy(options.on_error)
    scan = corpus.scan(policy)
    if not scan.passages:
        raise ValueError(f"{corpus} has no passage to generate queries for; give a folder or file with passages")
    if report := policy.report():
        print_line(report)
    require_folder_kind(Path(out), GENERATED)
    for file in OUTPUT_CORPORA:
        require_other_output(Path(out) / file, [("the corpus", corpus.data)])
    with open_leases(Path(out), options.lease) as leases:
        job = GenerationJob(Path(model), corpus, scan, decoding, options, leases)
        job.begin()
        job.fill()
        return job.finish()


@dataclass
class GenerationJob:
    """A job that fills a folder with parts."""

    model: Path
    corpus: Corpus
    scan: CorpusScan
    decoding: DecodingOptions
    options: GenerationOptions
    leases: Leases
    parts_written: int = 0
    passages_cut: int = 0  # passages of these parts that were too long
    passages_read: int = 0  # passages of these parts

    @property
    def folder(self) -> Path:
        return self.leases.folder

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """Everything that the queries depend on, as JSON. The number of devices changes them by rounding only."""
        files = sorted({*weight_files(self.model).values(), self.model / "config.json"})
        weights = {path.name: sha256_file(path) for path in files}
        names = "prompt", "passage_length", "dtype", "tokens_per_batch", "part_rows"
        return {
            "model": weights | TextTokenizer.digests(self.model),
            "corpus": {"sha256": self.scan.sha256, "passages": self.scan.passages},
            "decoding": asdict(self.decoding),
            "generation": {name: getattr(self.options, name) for name in names},
        }

    @cached_property
    def generator(self) -> QueryGenerator:
        options = self.options
        texts, compute = (options.prompt, options.passage_length), (options.dtype, options.tokens_per_batch)
        return open_query_generator(self.model, *texts, self.decoding, *compute, make_mesh())

    @property
    def parts(self) -> list[Path]:
        """Files of all parts, whether or not they exist."""
        count = -(-self.scan.passages // self.options.part_rows)
        return [self.folder / PARTS / f"{number:07}.json" for number in range(count)]

    def begin(self) -> None:
        """Record what the queries are made from. Raises ValueError if the folder holds queries of other settings."""
        path = self.folder / GENERATION_FILE
        if not path.exists():
            _ = self.generator  # raises before settings are written, because written settings would exclude others
        self.leases.publish_once(path, with_digest(self.made_from))
        if difference := first_difference(read_with_digest(path), self.made_from):
            name, old, current = difference
            raise ValueError(
                f"{self.folder} has queries that were made with {name} {old!r}, and this command has {current!r}; "
                "give another --out, or the same settings"
            )
        (self.folder / PARTS).mkdir(exist_ok=True)

    def fill(self) -> None:
        """Generate the queries of parts that no other job has, until all parts exist."""
        parts, has_waited = self.parts, False
        total = self.scan.passages
        with Progress("generate", total, "passage") as bar:
            while missing_numbers := {number for number, path in enumerate(parts) if not path.exists()}:
                bar.update(max(total - len(missing_numbers) * self.options.part_rows - bar.done, 0))
                parts_before = self.parts_written
                if any(self.leases.is_free(f"part-{number}") for number in missing_numbers):  # else nothing is read
                    self.generate(parts, missing_numbers, bar)
                self.leases.refresh()
                # If this job wrote nothing, other jobs have the missing parts.
                if self.parts_written == parts_before and any(not path.exists() for path in parts):
                    if not has_waited:
                        print_line(f"waiting for {len(missing_numbers)} part(s) of other jobs")
                    has_waited = True
                    time.sleep(_PAUSE)
        if self.passages_read:
            print_line(
                f"{self.passages_read:,} passages: {self.passages_cut / self.passages_read:.1%} cut, so that prompt "
                f"and passage have at most {self.options.passage_length} tokens"
            )

    def generate(self, parts: list[Path], missing_numbers: set[int], bar: Any) -> None:
        """Read the corpus once, and write those of the missing parts that can be claimed."""
        passages = self.corpus.read(Policy(self.options.on_error), self.scan)
        for number, path in enumerate(parts):
            block = list(islice(passages, self.options.part_rows))
            if number in missing_numbers:
                self.leases.refresh()
            if number not in missing_numbers or path.exists():
                continue
            lease = self.leases.claim(f"part-{number}")
            if lease is None:
                continue
            try:
                if not path.exists() and lease.publish(partial(self.write_part, number, path, block, lease, bar)):
                    self.parts_written += 1
            finally:
                self.leases.release(lease)
        for _ in passages:  # the digest of the corpus is compared at its end
            pass

    def write_part(self, number: int, path: Path, passages: list[Passage], lease: Lease, bar: Any) -> None:
        """Generate and write the queries of a part.

        Args:
            number: number of the part.
            passages: passages of the part.
            lease: lease of the part.
        """
        queries, cut = self.generator(passages, number * self.options.part_rows, bar.update)
        rows = [[passage.id, texts] for passage, texts in zip(passages, queries, strict=True)]
        content = {"part": number, "made_from": sha256_json(self.made_from), "queries": rows}
        write_json(path, with_digest(content), lease.work)
        self.passages_cut += cut
        self.passages_read += len(passages)

    def queries(self) -> Iterator[tuple[str, list[str]]]:
        """Yield (passage id, queries) of all parts. Raises ValueError for a damaged part."""
        for number, path in enumerate(self.parts):
            remedy = "remove it, and run the command again"
            try:
                content = read_with_digest(path)
            except ValueError as error:
                raise ValueError(f"{error}; {remedy}") from error
            if (content.get("part"), content.get("made_from")) != (number, sha256_json(self.made_from)):
                record = self.folder / GENERATION_FILE
                raise ValueError(f"{path} is a part of other queries than {record} describes; {remedy}")
            yield from ((key, texts) for key, texts in content["queries"])

    def finish(self) -> GenerationResult:
        """Write the outputs from the parts. Only one job at a time writes them, and every job writes the same bytes."""
        queries = GeneratedQueries(self.corpus, self.scan, self.options.on_error, self.queries)
        while True:
            if lease := self.leases.claim(LAST):
                files: list[Path] = []
                write = partial(self._write_outputs, queries, lease.work, files)
                try:
                    published = lease.publish(write)
                finally:
                    self.leases.release(lease)
                if published:
                    break
            time.sleep(_PAUSE)
            self.leases.refresh()
        self.leases.clear()
        return GenerationResult(
            passages=self.scan.passages,
            with_queries=queries.with_queries,
            queries=queries.count,
            parts=len(self.parts),
            parts_written=self.parts_written,
            programs=self.generator.program.count if self.parts_written else 0,
            files=tuple(files),
        )

    def _write_outputs(self, queries: GeneratedQueries, work: Path, files: list[Path]) -> None:
        queries.count_queries()
        for name in self.options.write:
            files.extend(OUTPUTS[name](queries, self.folder, work))


def first_difference(old: Any, current: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return (key path, stored value, current value) of the first leaf that differs between two JSON values."""
    if isinstance(old, dict) and isinstance(current, dict):
        for key in sorted(old.keys() | current.keys()):
            if difference := first_difference(old.get(key), current.get(key), f"{name}.{key}".strip(".")):
                return difference
        return None
    return None if old == current else (name, old, current)
