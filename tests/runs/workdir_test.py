"""The layout of a run's folder, and names that must not leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.runs.run_warnings import keep_warnings, read_warnings
from jaxret.runs.workdir import Workdir


def test_paths_are_inside_the_folder_and_distinct(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path / "mlr")
    parts = [name for name, value in vars(Workdir).items() if hasattr(value, "__get__") and not callable(value)]
    paths = [path for name in parts if isinstance(path := getattr(workdir, name), Path)]
    paths += [workdir.embeddings("wiki"), workdir.rankings("nq.test"), workdir.evaluation("nq.test")]
    paths += [workdir.encoding_time("wiki")]
    assert len(set(paths)) == len(paths) == 20
    assert all(path.is_relative_to(tmp_path / "mlr") for path in paths)
    assert workdir.embeddings("wiki") == tmp_path / "mlr" / "embeddings" / "wiki"
    assert workdir.rankings("nq.test") == tmp_path / "mlr" / "runs" / "nq.test.trec"
    assert workdir.evaluation("nq.test") == tmp_path / "mlr" / "eval" / "nq.test.json"
    assert not workdir.path.exists(), "reading creates nothing"


def test_a_workdir_is_made_from_paths_and_workdirs(tmp_path: Path) -> None:
    assert Workdir(str(tmp_path)) == Workdir(tmp_path) == Workdir(Workdir(tmp_path))
    assert (str(Workdir(tmp_path)), Path(Workdir(tmp_path))) == (str(tmp_path), tmp_path)
    assert Workdir(tmp_path).name == tmp_path.name
    assert Workdir(".").name == Path.cwd().name
    assert Workdir(tmp_path / "eval" / "..").name == tmp_path.name


def test_an_empty_path_is_an_error() -> None:
    """--workdir=$RUN gives an empty path if the variable is not set."""
    with pytest.raises(ValueError, match=r"the workdir is empty"):
        Workdir("")


def test_only_complete_corpora_are_listed(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    assert not workdir.corpora
    for name in ("wiki", "news", "half"):
        workdir.embeddings(name).mkdir(parents=True)
    for name in ("wiki", "news"):
        (workdir.embeddings(name) / "manifest.json").touch()
    assert workdir.corpora == ("news", "wiki")


def test_existing_evaluations_are_listed(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    assert not workdir.evaluations
    workdir.evaluation("nq.test").parent.mkdir()
    for name in ("nq.test", "fiqa.dev"):
        workdir.evaluation(name).touch()
    assert workdir.evaluations == (workdir.evaluation("fiqa.dev"), workdir.evaluation("nq.test"))


@pytest.mark.parametrize("name", ["", ".", "..", "../escape", "a/b", "/etc", "a\\b", ".hidden", "a\0b"])
def test_names_outside_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    for place in (workdir.embeddings, workdir.rankings, workdir.evaluation):
        with pytest.raises(ValueError, match=r"(corpus|data set) .*; .*empty"):
            place(name)
    with pytest.raises(ValueError, match=r"corpus .*201 .*200"):
        workdir.embeddings("ü" * 100 + "x")
    assert workdir.embeddings("a..b").parent == tmp_path / "embeddings", "control: dots within a name are allowed"


@pytest.mark.parametrize("job", ["encode {}", "search {}", "append {} 12345"])
def test_a_job_of_the_longest_name_keeps_its_warnings(job: str, tmp_path: Path) -> None:
    workdir, name = Workdir(tmp_path), "ü" * 100
    for place in (workdir.embeddings, workdir.rankings, workdir.evaluation):
        assert name in str(place(name))
    keep_warnings(workdir, job.format(name), [])
    assert read_warnings(workdir) == {job.format(name): []}
