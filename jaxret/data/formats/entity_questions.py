"""EntityQuestions: a JSON file of questions with answers for each of 24 relations (P17.test.json)."""

from __future__ import annotations

import re
from dataclasses import replace

from jaxret.data.errors import Policy
from jaxret.data.formats.dpr import ANSWERS, QUESTION, read_question_queries
from jaxret.data.formats.format import DataFile, record_format
from jaxret.data.records import Query

_RELATION = re.compile(r"(P\d+)\.")


def read_relation_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the questions of a file. An id has the file's relation and the record's number from 0: "P17-0"."""
    relation = _RELATION.match(file.path.name)
    queries = read_question_queries(file, policy)
    return [replace(query, id=f"{relation[1]}-{query.id}") for query in queries] if relation else queries


FORMATS = (
    record_format(
        "entity.questions",
        "EntityQuestions",
        (QUESTION, ANSWERS),
        queries=read_relation_queries,
        without_query_ids=True,
    ),
)
