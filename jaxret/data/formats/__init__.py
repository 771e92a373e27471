"""Files <-> records: the front that the rest of the project reads data through.

What a file is shows in its content (`recognise.py` has the table of formats); FORMAT:PATH forces a format. Which file
of a folder holds what shows in its name (`folders.py`). A new format is a file with `FORMATS`, and its lines in the
table.

Every reader takes a `Policy`; the default stops at the first bad record with a `DataError` that names file and line.
"""

from jaxret.data.files import DataError, Policy
from jaxret.data.formats.beir import write_beir
from jaxret.data.formats.corpora import (
    ChangedError,
    CorpusScan,
    corpus_file,
    found_corpus,
    hash_id,
    read_corpus,
    read_located,
    scan_corpus,
    stat_corpus,
    stat_files,
)
from jaxret.data.formats.dpr import write_dpr_corpus, write_dpr_examples, write_dpr_queries
from jaxret.data.formats.dpr_results import write_results
from jaxret.data.formats.readers import (
    describe,
    example_files,
    found_queries,
    read_examples,
    read_judgements,
    read_queries,
    read_run,
    run_files,
)
from jaxret.data.formats.recognise import absolute, called, exists, recognise, source_path, split_source
from jaxret.data.formats.trec import write_run
from jaxret.data.libraries.named import files_of, is_named

__all__ = [
    "ChangedError",
    "CorpusScan",
    "DataError",
    "Policy",
    "absolute",
    "called",
    "corpus_file",
    "describe",
    "example_files",
    "exists",
    "files_of",
    "found_corpus",
    "found_queries",
    "hash_id",
    "is_named",
    "read_corpus",
    "read_examples",
    "read_judgements",
    "read_located",
    "read_queries",
    "read_run",
    "recognise",
    "run_files",
    "scan_corpus",
    "source_path",
    "split_source",
    "stat_corpus",
    "stat_files",
    "write_beir",
    "write_dpr_corpus",
    "write_dpr_examples",
    "write_dpr_queries",
    "write_results",
    "write_run",
]
