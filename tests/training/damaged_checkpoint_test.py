"""Two processes, of which one finds its part of the newest checkpoint damaged: both resume from the checkpoint
before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import ONE_DEVICE, free_address, train_arguments, write_data, write_encoder
from tests.storage.buckets.servers import finish, start


@pytest.mark.slow
def test_all_processes_go_on_from_one_checkpoint(tmp_path: Path) -> None:
    encoder, data, workdir = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data"), tmp_path / "run"
    best = {"data__dev": str(data), "validation__metric": "average_rank", "validation__best": "metric"}

    def train() -> list[str]:
        keys: dict[str, Any] = {"train__steps": 4, "train__checkpoint_every": 2, "mesh__fsdp": 2, **best}
        keys |= {"mesh__coordinator": free_address(), "mesh__num_processes": 2}
        flags = [train_arguments(encoder, data, workdir, **keys, mesh__process_id=number) for number in range(2)]
        return [finish(job) for job in [start("train.py", ONE_DEVICE, *each) for each in flags]]

    train()
    checkpoints = workdir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4"], "the best and the last checkpoint"
    newest = checkpoints / "4"
    expected = json.loads((newest / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["digests"]
    parts = list(newest.glob("params/ocdbt.process_1/d/*"))
    assert parts, "process 1 has written a part"
    for path in parts:
        path.write_bytes(b"")

    first = train()[0]
    assert re.search(rf"{newest} (is damaged|cannot be read).*; it is now {checkpoints}/damaged-4", first), first
    assert "training continues from checkpoint 2" in first
    again = json.loads((newest / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["digests"]
    assert again == expected
