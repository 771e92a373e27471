"""Compare sizes of the vectors of an encoded corpus: search by their first dimensions, and print a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxret.evaluation.evaluation_report import emit_table, evaluation_text
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoding.corpus_folder import corpus_folder
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
    """Search for the queries of files with each size (`search_files`), and print and return size -> evaluation.

    Args:
        run: the run that encoded the corpus.
        sizes: numbers of dimensions; 0 for all that are stored.
        source: queries and judgements.
        evaluation: measures and further results.
        options: options of the search.
        encoded_name: the encoded corpus: its name, or the path that was encoded; "" for the only one.

    Raises:
        ValueError: a size is larger than the stored vectors, vectors cannot be cut, or several sizes have no
            judgements.
    """
    full_size = read_shards(corpus_folder(run.workdir, encoded_name)).dimension
    numbers = [size or full_size for size in sizes]
    if len(sizes) > 1 and source.judgements is None:
        raise ValueError("several sizes of --dimension are compared by judgements: give --qrels too, or one size")
    for size in numbers:
        if size > full_size:
            raise ValueError(f"--dimension={size}: the vectors of this corpus have {full_size} dimensions")
        run.with_dimension(size, "--dimension")
    evaluations: dict[int, Evaluation] = {}
    for size, count in zip(sizes, numbers, strict=True):
        print(f"by {'all' if size == 0 else 'the first'} {count} dimensions:")
        result = search_files(run, source, evaluation, replace(options, dimension=size), encoded_name)
        evaluations |= {count: result} if result else {}
    if len(evaluations) > 1:
        print("\nby number of dimensions:")
        table = {str(count): evaluations[count] for count in sorted(evaluations)}
        print(evaluation_text(table))
        emit_table(table)
    return evaluations
