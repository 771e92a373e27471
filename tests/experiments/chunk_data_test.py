"""The chunks of a corpus keep what belongs to the whole passage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from jaxret.data.chunks import ChunkOptions
from jaxret.data.errors import Policy
from jaxret.experiments.chunk_data import chunk_data, open_texts

ROWS = [
    {
        "_id": "a",
        "text": "one two three",
        "metadata": {"year": 2015, "author": {"name": "Knuth"}},
        "topic": "x",
        "vector": [0.5] * 33,
    },
    {"_id": "b", "text": "", "topic": "empty"},
    {"_id": "a", "text": "again", "topic": "repeated"},
    {"_id": "c", "text": "four", "title": "Title"},
]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.json", "corpus.jsonl.gz"])
def test_chunks_have_the_metadata_of_their_passage(name: str, tmp_path: Path) -> None:
    data = (json.dumps(ROWS) if name == "corpus.json" else "".join(json.dumps(row) + "\n" for row in ROWS)).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    out = tmp_path / "chunks.jsonl"
    counts = chunk_data(open_texts(tmp_path / name), str(out), ChunkOptions(words=2), Policy("skip"))
    assert (counts.records_read, counts.records_written) == (2, 3)
    metadata = {"topic": "x", "year": 2015, "author": {"name": "Knuth"}}
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"docid": "a#0", "title": "", "text": "one two", "metadata": metadata},
        {"docid": "a#1", "title": "", "text": "three", "metadata": metadata},
        {"docid": "c#0", "title": "Title", "text": "four"},
    ]
