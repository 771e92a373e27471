"""The files of launch/: their shell code, their flags, and each of them run to its end with processes on this
machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxret.configs.base import get_config
from jaxret.data.formats import Corpus
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.shard_set import open_shards
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json
from jaxret.training.loop import train
from tests.pipeline import (
    ONE_DEVICE,
    REPOSITORY,
    environment,
    flat_config,
    free_address,
    tiny_config,
    write_data,
    write_encoder,
)

LAUNCH = REPOSITORY / "launch"
SHELL = sorted(LAUNCH.glob("*.sh"))
STEPS = ("train", "encode", "search")
HOSTS = 2
Runs = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("file", SHELL, ids=lambda file: file.name)
def test_shell(file: Path) -> None:
    assert os.access(file, os.X_OK)
    assert subprocess.run(["bash", "-n", file], capture_output=True, text=True).stderr == ""


def test_shellcheck() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not program:
        pytest.skip("shellcheck is not installed: it comes with requirements-dev.txt")
    done = subprocess.run([program, *SHELL], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def manifests(step: str, file: str = "kubernetes.yaml") -> dict[str, Any]:
    """Return the Kubernetes objects of a step, by kind."""
    text = (LAUNCH / file).read_text().replace("STEP", step)
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Return a function that runs a file of launch/ with the srun and gcloud of tests/launch/cluster.py in the path,
    and with a home that has the repository as jaxret/, like the hosts of a TPU."""
    for name in ("srun", "gcloud"):
        (tmp_path / name).write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent}/cluster.py {name} "$@"\n'
        )
        (tmp_path / name).chmod(0o755)
    (tmp_path / "jaxret").symlink_to(REPOSITORY)
    port = free_address().rpartition(":")[2]
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HOSTS": str(HOSTS),
        "JAX_COORDINATOR_PORT": port,
        **ONE_DEVICE,
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "PYTHON": sys.executable,
        "PLATFORM": "cpu",
        "TPU": "slice",
        "ZONE": "here",
        "DATA": "folder with spaces",
        "WORKDIR": "/w",
    }

    def run(*command: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment() | variables | settings,
            capture_output=True,
            text=True,
            timeout=1200,
        )

    return run


def indexed_job(step: str, file: str) -> tuple[dict[str, Any], str]:
    """Return the Job of a step, and the host name of process 0."""
    objects = manifests(step, file)
    if file == "jobset.yaml":
        name = objects["JobSet"]["metadata"]["name"]
        (slices,) = objects["JobSet"]["spec"]["replicatedJobs"]
        assert slices["replicas"] == 1
        return slices["template"], f"{name}-{slices['name']}-0-0.{name}"
    job, service = objects["Job"], objects["Service"]
    pod = job["spec"]["template"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    return job, f"{job['metadata']['name']}-0.{pod['spec']['subdomain']}"


def by_kubernetes(file: str) -> Callable[..., list[subprocess.CompletedProcess[str]]]:
    def launch(run: Runs, **settings: str) -> list[subprocess.CompletedProcess[str]]:
        """Run the steps one after the other, as the kubelets of the hosts would."""
        done = []
        for step in STEPS:
            job, first = indexed_job(step, file)
            (container,) = job["spec"]["template"]["spec"]["containers"]
            variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
            assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NUM_PROCESSES"]) == HOSTS
            assert job["spec"]["completionMode"] == "Indexed"
            assert variables["COORDINATOR"].startswith(f"{first}:")
            here = variables | settings | {"COORDINATOR": free_address()}
            command = f"PROCESS_ID=$i {shlex.join(container['command'])}"
            done.append(run("bash", "-c", on_all_hosts(command), **here))
        return done

    return launch


def by_skypilot(run: Runs, **settings: str) -> list[subprocess.CompletedProcess[str]]:
    """Run the steps one after the other, as SkyPilot would on all of its machines."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["num_nodes"] == HOSTS
    assert (REPOSITORY / task["setup"].split()[0]).is_file()
    assert (REPOSITORY / task["setup"].split()[1]).is_file()
    port = free_address().rpartition(":")[2]
    nodes = {"SKYPILOT_NUM_NODES": str(HOSTS), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "COORDINATOR_PORT": port}
    here = {"DATA": "folder with spaces", "WORKDIR": "/w"} | settings  # a user gives these with --env
    command = f"SKYPILOT_NODE_RANK=$i bash -c {shlex.quote(task['run'])}"
    return [run("bash", "-c", on_all_hosts(command), **task["envs"] | nodes | here | {"STEP": step}) for step in STEPS]


def on_all_hosts(command: str) -> str:
    """Return shell code that starts a command once per host, with $i as its number, and fails if one fails."""
    start = f"pods=(); for i in {' '.join(map(str, range(HOSTS)))}; do {command} & pods+=($!); done"
    end = 'status=0; for pod in "${pods[@]}"; do wait "$pod" || status=$?; done; exit $status'
    return f"{start}; {end}"


def by_file(name: str) -> Callable[..., list[subprocess.CompletedProcess[str]]]:
    def launch(run: Runs, **settings: str) -> list[subprocess.CompletedProcess[str]]:
        if name == "tpu.sh":
            return [run(LAUNCH / name, step, **settings) for step in STEPS]
        return [run(LAUNCH / name, **settings)]

    return launch


LAUNCHERS = {
    "node.sh": by_file("node.sh"),
    "slurm.sh": by_file("slurm.sh"),
    "tpu.sh": by_file("tpu.sh"),
    "kubernetes.yaml": by_kubernetes("kubernetes.yaml"),
    "jobset.yaml": by_kubernetes("jobset.yaml"),
    "skypilot.yaml": by_skypilot,
}
# Other files have the platform of the fixture.
PLATFORMS = {"kubernetes.yaml": "gpu", "jobset.yaml": "tpu", "skypilot.yaml": "gpu"}


@pytest.mark.table
@pytest.mark.parametrize("file", LAUNCHERS)
def test_processes_and_flags_of_every_launcher(file: str, runs: Runs) -> None:
    """Check which processes are started, and that all flags and keys that they get exist."""
    done = LAUNCHERS[file](runs, **{"STEP_DRY_RUN" if file in ("slurm.sh", "tpu.sh") else "DRY_RUN": "1"})
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * len(done)
    commands = [shlex.split(line) for one in done for line in one.stdout.splitlines()]
    several = 1 if file == "node.sh" else HOSTS
    scripts = [f"{step}.py" for step in STEPS]
    started = [Path(command[1]).name for command in commands]
    assert started == [scripts[0]] * several + [scripts[1]] * several + [scripts[2]] * several
    for program, path, *flags in commands:
        values = require_flags(program, path, flags)
        platform = values["config.mesh.platform" if path.endswith("train.py") else "platform"]
        assert platform == PLATFORMS.get(file, "cpu")


def require_flags(program: str, path: str, flags: list[str]) -> dict[str, str]:
    """Check that a command is one of the scripts, with flags that it defines; return their values."""
    script = Path(path).name
    assert Path(path).resolve() == REPOSITORY / script
    assert program in (sys.executable, "python")
    help_text = subprocess.run(
        [sys.executable, str(REPOSITORY / script), "-h"], env=environment(), capture_output=True, text=True
    ).stdout
    defined = re.findall(r"^  --(\w+)=", help_text, re.MULTILINE)
    keys = flat_config(get_config())
    values = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    for name, value in values.items():
        assert name in defined or (script == "train.py" and name.removeprefix("config.") in keys), (script, name)
        if name == "config":
            assert (REPOSITORY / value).is_file()
    return values


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_ray_job_runs_a_step_that_its_hosts_have_room_for(step: str, runs: Runs) -> None:
    spec = manifests(step, "kuberay.yaml")["RayJob"]["spec"]
    cluster = spec["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in head["env"]}
    assert worker["env"] == head["env"]
    assert worker["image"] == head["image"]
    image = (LAUNCH / "Dockerfile").read_text()
    assert f"WORKDIR {variables['PYTHONPATH']}\n" in image
    assert f"=={cluster['rayVersion']}" in image
    command = shlex.split(spec["entrypoint"].replace(f"{variables['PYTHONPATH']}/", f"{REPOSITORY}/"))
    done = runs(*command, **variables | {"DRY_RUN": "1", "PYTHON": "python"})
    assert (done.returncode, done.stderr) == (0, "")
    program, path, *flags = shlex.split(done.stdout)
    values = require_flags(program, path, flags)
    assert Path(path).name == f"{step}.py"
    assert (values["engine"], values["platform"], values["coordinator"]) == ("ray", "gpu", "")
    kind, count = values["resources"].split(":")
    assert (kind, int(count)) == ("GPU", worker["resources"]["limits"]["nvidia.com/gpu"])
    assert int(values["workers"]) == group["replicas"] == group["maxReplicas"]


@pytest.mark.parametrize("name", ["node.sh", "slurm.sh", "tpu.sh"])
def test_a_dry_run_prints_and_starts_nothing(name: str, runs: Runs, tmp_path: Path) -> None:
    for program in ("srun", "gcloud"):
        (tmp_path / program).write_text("#!/bin/sh\necho started >&2\n")
    steps = (*STEPS, "install") if name == "tpu.sh" else ("",)
    for step in steps:
        done = runs(LAUNCH / name, *filter(None, [step]), DRY_RUN="1", SOURCE="address")
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout.splitlines()) == (1 if step else len(STEPS))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("trian",), {}, "error: there is no step 'trian'"),
        ((), {}, "launch/step.sh train|encode|search"),
        (("train",), {"DATA": ""}, "DATA: a folder of data"),
        (("train",), {"PLATFORM": ""}, "PLATFORM: tpu, gpu or cpu"),
        (("encode",), {"COORDINATOR": "h:1"}, "NUM_PROCESSES: of the job"),
        (("train",), {"NUM_PROCESSES": "2"}, "is set, but no COORDINATOR: host:port of process 0"),
        (("search",), {"PROCESS_ID": "1"}, "is set, but no COORDINATOR: host:port of process 0"),
    ],
)
def test_missing_settings_of_a_step(
    arguments: tuple[str, ...], settings: dict[str, str], message: str, runs: Runs
) -> None:
    done = runs(LAUNCH / "step.sh", *arguments, **settings)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_an_environment_of_any_name(runs: Runs, tmp_path: Path) -> None:
    """The active environment is used, otherwise .venv; if there is none, the error is one sentence. PYTHON takes
    precedence."""
    python = tmp_path / "mine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        settings = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", variable: str(tmp_path / "mine")}
        done = runs(LAUNCH / "step.sh", "train", DRY_RUN="1", **{**settings, "PYTHON": ""})
        assert shlex.split(done.stdout)[0] == str(python), done.stderr
        done = runs(LAUNCH / "step.sh", "train", DRY_RUN="1", **{**settings, "PYTHON": "other"})
        assert shlex.split(done.stdout)[0] == "other"
    if not (REPOSITORY / ".venv").exists():
        none = {"VIRTUAL_ENV": "", "CONDA_PREFIX": str(tmp_path / "gone"), "PYTHON": "", "DRY_RUN": "1"}
        done = runs(LAUNCH / "step.sh", "train", **none)
        assert (done.returncode, done.stdout) == (1, "")
        assert "error: no environment is active, and" in done.stderr


def test_srun_takes_the_cores_of_sbatch(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "cores: ${SRUN_CPUS_PER_TASK:-none}"\n')
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for cores, settings in (("32", {"SLURM_CPUS_PER_TASK": "32"}), ("none", {})):
        done = runs(LAUNCH / "slurm.sh", PATH=path, **settings)
        assert set(done.stdout.splitlines()) == {f"cores: {cores}"}, done.stderr


@pytest.mark.parametrize(("version", "expected"), [("3.10", "-m uv venv"), ("3.12", "-m venv .venv")])
def test_an_old_python_is_not_taken(version: str, expected: str, tmp_path: Path) -> None:
    """The image of TPU VMs has Python 3.10. Fake programs named python print their arguments."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "requirements-tpu.txt").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    installed = "mkdir -p .venv/bin && cp $0 .venv/bin/python"
    (programs / "python3").write_text(
        f"""#!/bin/bash
case "$*" in
    -c*) exit {int(version == "3.10")} ;;
    *venv*) {installed} ;;
esac
echo "$*"
"""
    )
    (programs / "python3").chmod(0o755)
    for name in ("dirname", "bash", "mkdir", "cp"):
        os.symlink(shutil.which(name) or name, programs / name)
    done = subprocess.run(
        [tmp_path / "launch" / "environment.sh", "requirements-tpu.txt"],
        env={"PATH": str(programs)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stdout.splitlines()[-1] == "-m pip install -r requirements-tpu.txt"


@pytest.mark.parametrize("name", ["slurm.sh", "tpu.sh"])
def test_printed_commands_are_quoted(name: str, runs: Runs) -> None:
    """An argument keeps its spaces, and the step gets all variables."""
    steps = ("train",) if name == "tpu.sh" else ()
    flag = "--config.tokens.query_prompt=a question: "
    done = runs(LAUNCH / name, *steps, flag, DRY_RUN="1", TIMEOUT="7")
    command = shlex.split(done.stdout.splitlines()[0])
    if name == "tpu.sh":
        (sent,) = (part.removeprefix("--command=") for part in command if part.startswith("--command="))
        command = shlex.split(sent)
        assert {"TIMEOUT=7", "DATA=folder with spaces"} <= {*command}
    assert command[-1] == flag


@pytest.mark.parametrize("name", ["node.sh", "step.sh"])
def test_relative_paths_are_the_callers(name: str, runs: Runs, tmp_path: Path) -> None:
    """Like in every other command, they are relative to the caller's folder, not to the repository."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$PWD $2"\n')
    program.chmod(0o755)
    step = "train" if name == "step.sh" else ""
    done = runs("bash", "-c", f"cd {tmp_path} && exec {LAUNCH / name} {step}", PYTHON="./program", WORKDIR="w")
    assert done.stdout.splitlines() == [f"{tmp_path} --workdir=w"] * (1 if step else len(STEPS))


def test_hosts_of_a_tpu_share_a_folder(runs: Runs) -> None:
    done = runs(LAUNCH / "tpu.sh", "train", DRY_RUN="1", WORKDIR="runs/mlr")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: WORKDIR is 'runs/mlr'; give gs://BUCKET/FOLDER, or the absolute path of a folder that all hosts have "
        "mounted\n"
    )
    done = runs(LAUNCH / "tpu.sh", "encode", DRY_RUN="1", WORKDIR="gs://bucket/runs/mlr")
    assert done.returncode == 0
    assert "WORKDIR=gs://bucket/runs/mlr" in done.stdout


def test_signals_reach_the_step(runs: Runs, tmp_path: Path) -> None:
    """The step's process replaces the script's: a shell in between would end, or not pass SIGTERM on."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $$\n")
    program.chmod(0o755)
    done = runs("bash", "-c", f"echo $$; exec {LAUNCH}/step.sh train", PYTHON=str(program))
    first, second = done.stdout.split()
    assert first == second


def test_the_kubernetes_objects_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs: pip install kubernetes-validate (no cluster)")
    for step in STEPS:
        job = manifests(step, "jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]["template"]
        cluster = manifests(step, "kuberay.yaml")["RayJob"]["spec"]["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        own = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}} | job
        pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}} | group["template"] for group in groups]
        for manifest in (*manifests(step).values(), own, *pods):
            validate.validate(manifest, validate.latest_version(), strict=True)


def test_the_image_copies_existing_files() -> None:
    sources = re.findall(r"^COPY (.*) \S+$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)
    assert all((REPOSITORY / name).exists() for line in sources for name in line.split())
    assert {"jaxret", "configs", "launch", "train.py", "requirements-tpu.txt"} <= {
        name for line in sources for name in line.split()
    }


@dataclass(frozen=True)
class Job:
    settings: dict[str, str]  # CONFIG and DATA
    alone: Path  # the run folder of the same job in this process


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("launch")
    encoder, data, base = write_encoder(folder / "encoder"), write_data(folder / "data"), flat_config(get_config())
    tiny = tiny_config(encoder, data, train__checkpoint_every=0)
    train(tiny, folder / "alone", progress=False)
    encode_corpus(open_run(folder / "alone"), Corpus.open(data), progress=False)
    changed = {key: value for key, value in flat_config(tiny).items() if value != base[key]}
    (folder / "tiny.py").write_text(
        "from jaxret.configs.base import get_config as base\n\n\ndef get_config():\n    config = base()\n"
        f"    config.update_from_flattened_dict({changed!r})\n    return config\n"
    )
    return Job({"CONFIG": str(folder / "tiny.py"), "DATA": str(data)}, folder / "alone")


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", LAUNCHERS)
def test_every_launcher_trains_encodes_and_searches(file: str, job: Job, runs: Runs, tmp_path: Path) -> None:
    """Two processes replace the hosts; the results equal those of this process."""
    workdir = tmp_path / "run"
    done = LAUNCHERS[file](runs, **job.settings, WORKDIR=str(workdir), PLATFORM="cpu", PYTHON=sys.executable)
    assert [one.returncode for one in done] == [0] * len(done), [one.stderr for one in done]
    assert not any("Traceback" in one.stderr for one in done)
    assert (workdir / "runs" / "data.test.trec").stat().st_size
    assert read_json(workdir / "env.json")["processes"] == (1 if file == "node.sh" else HOSTS)
    whole, parts = (open_shards(folder / "embeddings" / "data") for folder in (job.alone, workdir))
    rows = range(whole.total_rows)
    assert parts.ids(rows) == whole.ids(rows)
    actual, expected = (np.concatenate([vectors for _, vectors in shards]) for shards in (parts, whole))
    np.testing.assert_allclose(actual, expected, atol=1e-3)
    assert np.abs(np.diff(expected[:, 0], axis=0)).max() > 0.1, "control: the vectors of two passages differ"
