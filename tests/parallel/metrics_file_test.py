"""The file for the node exporter of Prometheus: progress, metrics and the exit status of a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxret.parallel.metrics_file import MetricsFile, start_metrics_file
from tests.pipeline import run_script, train_arguments, write_data, write_encoder


def samples(path: Path) -> dict[tuple[str, ...], float]:
    """Return (metric, label values in the order of their names) -> value."""
    families = text_string_to_metric_families(path.read_text())
    lines = [sample for family in families for sample in family.samples]
    return {(one.name, *(one.labels[key] for key in sorted(one.labels))): one.value for one in lines}


def test_the_missing_package_is_named_by_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("'jaxret[serve]'")):
        MetricsFile(str(tmp_path / "job.prom"), "train")


@pytest.mark.slow
def test_a_training_and_an_encoding(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    run, file = tmp_path / "run", tmp_path / "job.prom"
    train = train_arguments(tmp_path / "encoder", tmp_path / "data", run)
    assert run_script("-m", "jaxret", "train", *train, f"--prometheus={file}").returncode == 0
    values = samples(file)
    assert values["jaxret_job_status", "train"] == 0
    assert values["jaxret_job_step", str(run), "train"] == 6
    assert 0 < values["jaxret_job_metric", "loss", str(run), "train"] < 20
    assert [values[name, "step", "train", "train"] for name in ("jaxret_job_done", "jaxret_job_total")] == [6, 6]
    corpus = tmp_path / "data" / "corpus.jsonl"
    encode = "-m", "jaxret", "encode", f"--workdir={run}", f"--corpus={corpus}", "--quiet", f"--prometheus={file}"
    assert run_script(*encode).returncode == 0
    values = samples(file)
    assert values["jaxret_job_status", "encode"] == 0
    passages = len(corpus.read_text().splitlines())
    assert values["jaxret_job_done", "passage", "encode", "encode"] == passages
    failed = run_script("-m", "jaxret", "encode", f"--workdir={run}", "--corpus=none.jsonl", f"--prometheus={file}")
    assert failed.returncode == 1
    assert samples(file)["jaxret_job_status", "encode"] == 1


def test_a_removed_folder_does_not_end_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    file = MetricsFile(str(tmp_path / "folder" / "job.prom"), "train")
    (tmp_path / "folder" / "job.prom").unlink()
    (tmp_path / "folder").rmdir()
    file.write()
    file.write()
    assert capfd.readouterr().err.count("is not written") == 1


@pytest.mark.parametrize(
    ("name", "message"), [("job.txt", "must end with .prom"), ("none/job.prom", "there is no folder .*none")]
)
def test_file_names_without_the_suffix_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        start_metrics_file(str(tmp_path / name), "train")
    assert not list(tmp_path.iterdir())
