"""Compare sizes of the vectors of an encoded corpus: search by the first numbers of each, and print a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxret.evaluation.evaluation_report import emit_table, evaluation_text
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.experiments.evaluation_queries import EvaluationSource
from jaxret.experiments.search_files import search_files
from jaxret.index.corpus_folder import corpus_folder
from jaxret.index.shard_set import read_shards
from jaxret.runs.run import Run
from jaxret.search.search_options import SearchOptions


def search_sizes(
    run: Run,
    sizes: Sequence[int],
    source: EvaluationSource,
    evaluation: EvaluationOptions = EvaluationOptions(),
    options: SearchOptions = SearchOptions(),
    encoded_name: str = "",
) -> dict[int, Evaluation]:
    """Search for the queries of files once for each size, as `search_files` does, print measures by size, and return
    them.

    Args:
        run: the run that encoded the corpus.
        sizes: numbers of a vector; 0: all that are stored.
        source: queries and judgements.
        evaluation: measures and further results.
        encoded_name: the encoded corpus: its name, or the path that was encoded; "" for the only one.

    Raises:
        ValueError: more numbers than are stored, vectors that cannot be cut, or no judgements for a table.
    """
    full_size = read_shards(corpus_folder(run.workdir, encoded_name)).dimension
    numbers = [size or full_size for size in sizes]
    if len(sizes) > 1 and source.judgements is None:
        raise ValueError("several sizes of --dimension are compared by judgements: give --qrels too, or one size")
    for size in numbers:
        if size > full_size:
            raise ValueError(f"--dimension={size}: the vectors of this corpus have {full_size} numbers")
        run.with_dimension(size, "--dimension")
    evaluations: dict[int, Evaluation] = {}
    for size, count in zip(sizes, numbers, strict=True):
        print(f"by {'all' if size == 0 else 'the first'} {count} numbers of a vector:")
        of_size = search_files(run, source, evaluation, replace(options, dimension=size), encoded_name)
        evaluations |= {count: of_size} if of_size else {}
    if len(evaluations) > 1:
        print("\nby numbers of a vector:")
        table = {str(count): evaluations[count] for count in sorted(evaluations)}
        print(evaluation_text(table))
        emit_table(table)
    return evaluations
