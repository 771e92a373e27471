"""The grid of a sweep: values as on a command line, and keys that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from jaxret.configs import load_config
from jaxret.experiments.sweeps.grid import read_grid, require_distinct_points
from jaxret.runs.mismatch import flatten
from jaxret.runs.run import config_json


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("head.mlr.chosen=(2,12);(4,12)", ((2, 12), (4, 12))),
        ("head.mlr.chosen=(2,12),(12,)", ((2, 12), (12,))),
        ("head.mlr.chosen=(12)", ((12,),)),
        ("loss.local_weight=0.01,0.1,1", (0.01, 0.1, 1.0)),
        ("data.subset=64,128", (64, 128)),
        ("normalize=true,False", (True, False)),
        ("pooling=none,average", ("none", "average")),
        ("tokens.query_prompt=query: ;Q, ", ("query:", "Q,")),
    ],
)
def test_values_have_the_types_of_the_config(entry: str, values: tuple[Any, ...]) -> None:
    axes = read_grid([entry], [], load_config("mlr"), ()).axes
    assert axes == {entry.partition("=")[0]: values}
    assert [type(value) for (axis,) in [axes.values()] for value in axis] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("entries", "seeds", "message"),
    [
        ([], [], "--grid=KEY=VALUE,VALUE must be given, or several --seeds"),
        (["data.subset"], [], "--grid=data.subset must be KEY=VALUE,VALUE"),
        (["data.subsett=1,2"], [], r"data.subsett: .*config .*data.subset\?"),
        (["data=1,2"], [], "^data is a group of keys"),
        (["data.subset=1,x"], [], r"'x' .*data.subset, .*number"),
        (["head.mlr.chosen=(1,2"], [], r"'\(1' .*value .*head.mlr.chosen, .*\(10,12\)"),
        (["data.subset=1,2", "data.subset=3"], [], "--grid has data.subset twice"),
        (["data.subset=1,2,1"], [], r"1 .*twice; .*counts"),
        (["train.batch_size=8,16"], [], "train.batch_size is set by --grid and by --config.train.batch_size"),
        (["seed.data=1,2"], ["1", "2"], r"seed.data .*--grid .*--seeds; remove"),
        (["data.subset=1,2"], ["1", "1"], "--seeds has 1 twice"),
        (["data.subset=1,2"], ["-1"], "'-1' is not a seed"),
        (["train.log_every=1,2"], [], r"train.log_every changes .*result"),
    ],
)
def test_contradicting_grids_are_errors(entries: list[str], seeds: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_grid(entries, seeds, load_config("mlr"), ("train.batch_size",))


def test_points_and_their_names() -> None:
    entries = ["head.mlr.chosen=(2,12);(4,12)", "loss.local_weight=0.1,1"]
    grid = read_grid(entries, ["3", "4"], load_config("mlr"), ())
    points = list(grid.points())
    assert [grid.label(point) for point in points] == [
        "chosen=2,12 local_weight=0.1",
        "chosen=2,12 local_weight=1",
        "chosen=4,12 local_weight=0.1",
        "chosen=4,12 local_weight=1",
    ]
    assert grid.folder(points[0]) == "chosen=2-12_local_weight=0.1"
    texts = read_grid(["encoder.checkpoint=a/b,a-b", "train.start_from=x,y"], [], load_config("mlr"), ())
    folders = [texts.folder(point) for point in texts.points()]
    assert len(set(folders)) == 4, (
        "characters that are not allowed in file names are replaced, and a digest keeps names unique"
    )
    assert not any("/" in folder for folder in folders)


def flat(**keys: Any) -> list[dict[str, Any]]:
    config = load_config("mlr")
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    return [flatten(config_json(config))]


def test_points_that_train_the_same_system_are_refused() -> None:
    grid = read_grid(["head.mvr.count=4,8"], [], load_config("mlr"), ())
    with pytest.raises(ValueError, match=r"'count=4' .*'count=8' .*head.mvr.count .*: .*reads"):
        require_distinct_points(grid, {"count=4": flat(head__mvr__count=4), "count=8": flat(head__mvr__count=8)})
    read = {"head__name": "mvr"}
    require_distinct_points(grid, {"a": flat(head__mvr__count=4, **read), "b": flat(head__mvr__count=8, **read)})
    require_distinct_points(grid, {"a": flat(data__train="x"), "b": flat(data__train="y")})
    require_distinct_points(grid, {"a": flat(seed__data=1), "b": flat(seed__data=2)})
