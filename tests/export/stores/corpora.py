"""Encoded corpora of several kinds, for tests of exports to stores: with metadata, in parts, and with deleted rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxret.data.formats import Corpus
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_ids
from jaxret.runs.run import Run
from tests.index.runs import RunsByKind
from tests.pipeline import WORDS, write_data, write_encoder

COLOURS = ("red", "green", "blå")
KINDS: dict[str, dict[str, Any]] = {
    "one": {"normalize": True},
    "float16": {"normalize": True},
    "two": {"head__name": "me_bert", "head__me_bert__count": 2},
    "late": {"head__name": "colbert", "head__colbert__late": True, "head__colbert__projection": 6, "normalize": True},
}
# The module that each store needs, except Parquet.
PACKAGES = {"lancedb": "lancedb", "pgvector": "psycopg", "qdrant": "qdrant_client", "milvus": "pymilvus"}
ROWS = 52  # 28 of the first 30 passages remain, and 24 were appended


def record(i: int) -> dict[str, Any]:
    """Return a passage. Every seventh has no metadata; p5 and p6 have equal texts, so that they tie."""
    text = f"{WORDS[i % 18]} {WORDS[(i * 5) % 18]}, {i}" if i not in (5, 6) else "twice « the same"
    fields: dict[str, Any] = {"_id": f"p{i}", "title": WORDS[i % 7] if i not in (5, 6) else "", "text": text}
    own = {"colour": COLOURS[i % 3], "year": 2000 + i % 4, "tags": ["x", f"t{i % 4}"], "deep": {"er": i % 5 == 0}}
    return fields | ({"metadata": own | {"price": i / 4, "ID": f"0{i}"}} if i % 7 else {})


RECORDS = {f"p{i}": record(i) for i in range(54)}
DELETED = ("p2", "p11")


def encode_parts(run: Run, root: Path) -> None:
    """Encode 30 passages in shards of 8, append 24, and delete two."""
    options = EncodeOptions(shard_rows=8, dtype="float16" if run.workdir.path.name == "float16" else "float32")
    folder = encode_corpus(run, Corpus.open(root / "first.jsonl"), options=options, progress=False).folder
    append_corpus(run, Corpus.open(root / "second.jsonl"), folder, progress=False)
    delete_ids(folder, dict.fromkeys(DELETED))


def make_runs(root: Path) -> RunsByKind:
    """Write the passages; return runs by kind, each of which encodes them when it is first used."""
    write_encoder(root / "encoder")
    write_data(root / "data")
    lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in RECORDS.values()]
    (root / "first.jsonl").write_text("".join(lines[:30]), encoding="utf-8")
    (root / "second.jsonl").write_text("".join(lines[30:]), encoding="utf-8")
    return RunsByKind(root, KINDS, encode_parts)
