"""Readers and writers of data files. Other packages import them from here.

Formats are detected from content, not from file names (`detect.py` has the table of formats); FORMAT:PATH forces a
format. The names of a folder's files say which of them has passages, queries and judgements (`source_layout.py`). A new
format is a module with `FORMATS`, and a line in the table.

Every reader takes a `Policy`. The default policy raises a `DataError` with file and line at the first bad record.
"""

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats.corpus import ChangedCorpusError, Corpus, CorpusScan, stat_files
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.detect import parse_source, source_exists, source_path
from jaxret.data.formats.dpr_results import write_retrieval_results
from jaxret.data.formats.example_writers import write_dpr_examples
from jaxret.data.formats.format import hash_id
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.formats.roles import open_role
from jaxret.data.formats.sources import JudgementSource, QuerySource, TrainingSource, read_judged_queries
from jaxret.data.formats.trec import write_run
from jaxret.data.formats.writers import write_beir, write_dpr_corpus, write_dpr_queries
from jaxret.data.libraries.named import is_named
from jaxret.data.libraries.open_sets import list_files

__all__ = [
    "ChangedCorpusError",
    "Corpus",
    "CorpusScan",
    "DataError",
    "DataSource",
    "JudgementSource",
    "Policy",
    "QuerySource",
    "RankingSource",
    "TrainingSource",
    "hash_id",
    "is_named",
    "list_files",
    "open_role",
    "parse_source",
    "read_judged_queries",
    "source_exists",
    "source_path",
    "stat_files",
    "write_beir",
    "write_dpr_corpus",
    "write_dpr_examples",
    "write_dpr_queries",
    "write_retrieval_results",
    "write_run",
]
