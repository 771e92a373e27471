"""A command that makes a folder leaves one of another kind as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxret.data.formats.build_data_set import build_data_set
from jaxret.storage.folder_kinds import DATA_SET, GENERATED, RECIPE, RUN, SWEEP, require_folder_kind
from jaxret.training.loop import train
from tests.pipeline import contents, tiny_config, write_data

MARKS = {
    RUN: "contract.json",
    SWEEP: "sweep.json",
    RECIPE: "done/encode.json",
    DATA_SET: "passages/1.0.0/dataset_info.json",
    GENERATED: "generation.json",
}


@pytest.mark.parametrize("kind", MARKS)
def test_a_folder_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "it[1]"
    require_folder_kind(folder, kind)  # one that is not there, and one that is empty
    (folder / MARKS[kind]).parent.mkdir(parents=True)
    require_folder_kind(folder, kind)
    (folder / MARKS[kind]).write_text("{}")
    require_folder_kind(folder, kind)
    for other in MARKS.keys() - {kind}:
        with pytest.raises(
            FileExistsError, match=re.escape(f"{folder} is {kind} (it has {MARKS[kind]}); give another folder")
        ):
            require_folder_kind(folder, other)


def test_a_data_set_and_a_run_are_not_made_in_each_other(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    config = tiny_config(tmp_path / "encoder", tmp_path / "data")
    makers: dict[str, Callable[[Path], object]] = {
        RUN: lambda folder: build_data_set(tmp_path / "data", folder, "1.0.0"),
        DATA_SET: lambda folder: train(config, folder, progress=False),
    }
    for number, (kind, make) in enumerate(makers.items()):
        folder = tmp_path / f"it{number}"
        (folder / MARKS[kind]).parent.mkdir(parents=True)
        (folder / MARKS[kind]).write_text("{}")
        with pytest.raises(FileExistsError, match=f"it{number} is "):
            make(folder)
        assert contents(folder) == {MARKS[kind]: b"{}"}
