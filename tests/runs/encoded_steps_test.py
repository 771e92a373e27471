"""Which checkpoints encoded the vectors in a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxret.runs.encoded_steps import encoded_steps
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import with_digest, write_json


def write_record(path: Path, checkpoint: Any) -> None:
    write_json(path, with_digest({"fingerprint": {"checkpoint": checkpoint}}))


def test_every_record_of_vectors_names_its_checkpoint(tmp_path: Path) -> None:
    """Corpora are finished, have begun, or lost their manifest because a shard is written again."""
    assert encoded_steps(Workdir(tmp_path)) == set()
    folder = tmp_path / "embeddings"
    write_record(folder / "finished" / "manifest.json", {"step": 2, "digest": "a"})
    write_record(folder / "begun" / "begun.json", {"step": 0, "digest": "b"})
    write_record(folder / "unfinished" / "shard-00001-of-00002.json", {"step": 5, "digest": "c"})
    write_record(folder / "same" / "manifest.json", {"step": 2, "digest": "a"})
    assert encoded_steps(Workdir(tmp_path)) == {0, 2, 5}


def test_files_that_name_no_checkpoint_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "embeddings" / "scifact"
    checkpoints: list[Any] = [None, [], {}, {"step": "2"}, {"step": None}]
    for checkpoint in checkpoints:
        write_record(folder / "manifest.json", checkpoint)
        assert encoded_steps(Workdir(tmp_path)) == set(), checkpoint
    write_record(folder / "shard-00000-of-00001.json", {"step": 3})
    for text in ("", "[]", "{}", '{"fingerprint": {"checkpoint": {"step": 2}}, "sha256": "ab"}'):
        (folder / "manifest.json").write_text(text)
        assert encoded_steps(Workdir(tmp_path)) == {3}, "the manifest is damaged; the shards are not"
