"""Flags, help, errors and exit statuses as a user sees them: each script runs as a process."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxret.cli import app as cli
from jaxret.cli.app import report_errors
from tests.pipeline import REPOSITORY, command, environment, run_script, untrained_run, write_data, write_encoder

MINILM = ("--config=configs/minilm.py", "--workdir=w")


@pytest.mark.table
@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("train.py", (), "--config and --workdir must be given"),
        ("train.py", ("--config=configs/minilm.py",), "--workdir must be given"),
        ("train.py", (*MINILM, "stray"), "unexpected argument 'stray': every argument is a flag"),
        ("train.py", (*MINILM, "--wrkdir=x"), "--wrkdir is not a flag; did you mean --workdir?"),
        (
            "train.py",
            ("--config=configs/mlr", "--workdir=w"),
            "is shipped; did you mean configs/mlr.py?",
        ),
        ("train.py", ("--config", "configs/nope.py", "--workdir=w"), "there is no file 'configs/nope.py'"),
        ("train.py", ("--config=", "--workdir=w"), "there is no file ''"),
        (
            "train.py",
            ("--config=configs/minilm.py:mrl", "--workdir=w"),
            "minilm.py:mrl: the suffix must be one of",
        ),
        ("train.py", ("--config=jaxret/types.py", "--workdir=w"), "has no function get_config()"),
        ("train.py", ("--workdir=w", "--config.train.steps=1"), "--config.train.steps needs a config to change"),
        (
            "train.py",
            (*MINILM, "--config.data.trian=x"),
            "configs/minilm.py has no such key; did you mean data.train?",
        ),
        ("train.py", (*MINILM, "--config.data=x"), "--config.data is a group of keys"),
        ("train.py", (*MINILM, "--config.train.steps=abc"), "--config.train.steps=abc: it must be a whole number"),
        ("train.py", (*MINILM, "--config.optimizer.learning_rate=abc"), "learning_rate=abc: it must be a number"),
        ("train.py", (*MINILM, "--config.encoder.tied=7"), "--config.encoder.tied=7: it must be true or false"),
        ("train.py", (*MINILM, "--config.mesh.coordinator=h:1"), "with --config.mesh.num_processes=1 and"),
        ("encode.py", ("--workdir=w", "--corpus=c", "--coordinator=h:1"), "with --num_processes=1 and --process_id=0"),
        (
            "encode.py",
            ("--workdir=w", "--corpus=c", "--on_error=sip"),
            "it must be one of error, skip, keep; did you mean skip?",
        ),
        ("encode.py", ("--workdir=w", "--corpus"), "Missing value for flag --corpus"),
        ("encode.py", ("--workdir=nowhere", "--corpus=x"), "nowhere is not a run"),
        ("search.py", ("--workdir=w", "--query=x", "--k=abc"), "--k=abc: it must be a whole number"),
        ("search.py", ("--workdir=w", "--query=x", "--k=0"), "--k=0: it must be a whole number of at least 1"),
        ("train.py", ("--config=configs/mlr.py:x", "--workdir=w"), "configs/mlr.py takes no suffix: remove ':x'"),
        ("search.py", ("--workdir=nowhere",), "give either --query"),
        ("search.py", ("--workdir=nowhere", "--query=x", "--split=test"), "--split needs --queries (a folder"),
        ("search.py", ("--workdir=nowhere", "--queries=q", "--latency_passages=x"), "'x' is not a number of passages"),
        ("search.py", ("--workdir=nowhere", "--query=x", "--workers=1"), "workers needs engine"),
        ("-m", ("jaxret", "index", "--workdir=nowhere", "--factory=SQ8", "--split=test"), "split needs queries"),
        ("-m", ("jaxret",), "a verb is missing: jaxret VERB, one of train, "),
        ("-m", ("jaxret", "demmo"), "'demmo' is not a verb; did you mean demo?"),
        ("-m", ("jaxret", "--config=mlr"), "'--config=mlr' is not a verb (jaxret -h lists them)"),
        ("-m", ("jaxret", "data"), "'data' is not a verb: it is data check or data "),
        ("-m", ("jaxret", "data", "chek", "x"), "'data chek' is not a verb; did you mean data check?"),
        ("-m", ("jaxret", "data", "qqq"), "'data qqq' is not a verb: it is data check or data "),
        ("-m", ("jaxret", "data", "check"), "SRC must be given"),
        ("-m", ("jaxret", "open", "x", "--workdir=w", "y"), "'y': besides MODEL every argument is a flag"),
        ("-m", ("jaxret", "open", "--workdir=w"), "MODEL must be given"),
        ("-m", ("jaxret", "data", "check", "x", "--lengths=a"), "--lengths=a: numbers of tokens are expected"),
        ("-m", ("jaxret", "demo", "--wrkdir=x"), "--wrkdir is not a flag; did you mean --workdir?"),
        (
            "-m",
            ("jaxret", "rerank", "--model=m", "--train=t", "--out=o", "--qrels=q"),
            "--qrels needs --run (a run to rerank); with --train all passages are scored",
        ),
        (
            "-m",
            ("jaxret", "rerank", "--model=m", "--run=r", "--out=o", "--negatives_run=n"),
            "--negatives_run needs --train (training data); remove it",
        ),
        ("-m", ("jaxret", "keywords", "--corpus=nowhere", "--out=x"), "nowhere"),
        ("-m", ("jaxret", "keywords", "--corpus=nowhere"), "--out must be given"),
        (
            "-m",
            ("jaxret", "keywords", "--corpus=x", "--out=no/where/x"),
            "error: --out=no/where/x: there is no folder /",
        ),
        ("-m", ("jaxret", "mine", "--data=x", "--out=/"), "error: --out=/ is a folder; give the name of a file"),
        ("-m", ("jaxret", "report", "x", "--out=/"), "error: --out=/ is a folder; give the name of a file"),
        (
            "-m",
            ("jaxret", "generate", "--model=x", "--corpus=x", f"--out={__file__}"),
            "app_test.py is a file; give the name of a folder",
        ),
        ("-m", ("jaxret", "data", "convert", "x", "no/where/x", "--to=beir"), "DST=no/where/x: there is no folder /"),
        (
            "-m",
            ("jaxret", "data", "convert", "x", "y", "--to=parquet"),
            "that is an ending, not a format: end y in .parq",
        ),
        ("-m", ("jaxret", "finetune"), "'finetune' is not a verb; did you mean train?"),
        ("search.py", ("--workdir=w", "--query=x", "--top_k=5"), "--top_k is not a flag; did you mean --k?"),
        ("train.py", (*MINILM, "--lr=1"), "--lr is not a flag; did you mean --config.optimizer.learning_rate?"),
        ("train.py", (*MINILM, "--config.optimizer.lr=1"), "no such key; did you mean optimizer.learning_rate?"),
        (
            "train.py",
            (MINILM[0], "--workdir=abfs://b/w"),
            "abfs://b/w: abfs:// is not supported: use gs:// or s3://",
        ),
        ("encode.py", ("--workdir=w", "--delete=p1"), "--delete=p1: this file does not exist. Give"),
        ("-m", ("jaxret", "export", "--workdir=w", "--to=faiss", "--out=x"), "qdrant, milvus; did you mean pyserini?"),
        ("encode.py", ("--workdir=hdfs://b/w", "--corpus=x"), "hdfs://b/w: hdfs:// is not supported"),
        ("encode.py", ("--workdir=s3a://b/w", "--corpus=x"), "s3a://b/w: s3a:// is not supported"),
        ("train.py", (MINILM[0], "--workdir=GS://b/w"), "GS://b/w: write gs:// in place of GS://"),
        ("-m", ("jaxret", "data", "check", "abfs://b/w"), "abfs://b/w: abfs:// is not supported"),
        ("-m", ("jaxret", "recipe", *MINILM), "--config.data.train must be given"),
        ("-m", ("jaxret", "index", "--workdir=w", "--type=HNSW"), "--type is not a flag; did you mean --factory?"),
        ("-m", ("jaxret", "export", "--workdir=w", "--format=hf"), "--format is not a flag; did you mean --to?"),
        (
            "-m",
            ("jaxret", "search", "run", "--query=x"),
            "--workdir must be given; every argument is a flag, such as --NAME=run",
        ),
        ("train.py", ("--config=mlr.yaml", "--workdir=w"), "no config of that name is shipped; did you mean mlr?"),
        ("train.py", ("--config=mlr", "--config.a=1", "--workdir=w"), "--config.a: mlr has no such key"),
    ],
)
def test_a_mistake_is_one_sentence(script: str, arguments: tuple[str, ...], message: str) -> None:
    done = run_script(script, *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not done.stdout


@pytest.mark.slow
def test_a_split_that_chooses_nothing_is_refused(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=4, dev=2)
    for split in ("train", "dev"):
        done = run_script("search.py", "--workdir=nowhere", f"--queries={data}", f"--split={split}")
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: --split={split} chooses nothing: {data} has the queries of all splits")
        assert done.stderr.endswith(f"give --qrels={data}, too\n")


@pytest.mark.parametrize("flag", ["-h", "--help", "--help="])
@pytest.mark.parametrize("script", ["train.py", "encode.py", "search.py"])
def test_help_is_the_docstring_and_the_flags(script: str, flag: str) -> None:
    done = run_script(script, "--workdir=x", flag)
    assert (done.returncode, done.stderr) == (0, "")
    source = (REPOSITORY / "jaxret" / "cli" / script).read_text()
    assert done.stdout.startswith(source.split('"""')[1])
    listed = re.findall(r"^  --(\w+)=", done.stdout, re.MULTILINE)
    assert listed[0] == ("config" if script == "train.py" else "workdir")
    assert set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source)) <= set(listed)
    assert len(done.stdout.splitlines()) < 48
    assert "[required]" in done.stdout
    assert ("--config.KEY=" in done.stdout) == (script == "train.py")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("x.jsonl:3: bad"), 1, "error: x.jsonl:3: bad"),
        (
            FileNotFoundError(2, "No such file or directory", "data.json"),
            1,
            "error: data.json: No such file or directory",
        ),
        (OSError("disk full"), 1, "error: disk full"),
        (FloatingPointError("NaN"), 1, "error: NaN"),
        (EOFError("cut"), 1, "error: cut"),
        (MemoryError(), 1, "error: out of memory"),
        (RuntimeError("choose another backend"), 1, "error: choose another backend"),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: gone\nstack\nstack"), 1, "error: UNAVAILABLE: gone"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB"),
            1,
            "error: the device is out of memory; smaller batches or chunks need less (train.batch_size, train.chunk",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            TypeError("no len()"),
            70,
            "unexpected error: TypeError: no len() (JAXRET_DEBUG=1 shows where; please report it)",
        ),
        (KeyError("x"), 70, "unexpected error: KeyError: 'x' ("),
        (RecursionError("deep"), 70, "unexpected error: RecursionError: deep ("),
        (AssertionError(), 70, "unexpected error: AssertionError:  ("),
    ],
)
def test_every_error_is_one_line_and_a_status(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXRET_DEBUG", "")
    with pytest.raises(SystemExit) as ended, report_errors():
        raise error
    assert ended.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    monkeypatch.setenv("JAXRET_DEBUG", "1")
    with pytest.raises(type(error)), report_errors():
        raise error


def test_a_custom_exit_status_is_kept() -> None:
    with pytest.raises(SystemExit) as ended, report_errors():
        raise SystemExit(143)
    assert ended.value.code == 143


PROGRAM = "import sys; from jaxret.cli.app import report_errors\nwith report_errors():\n    {0}"


def program(body: str, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body)],
        cwd=REPOSITORY,
        env=environment() | {"PYTHONUNBUFFERED": ""},
        **{**pipes, **options},
    )


@pytest.mark.parametrize(
    ("number", "status", "message"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, -signal.SIGTERM, "")]
)
def test_signals(number: int, status: int, message: str) -> None:
    # A shell's background jobs ignore SIGINT, and so do the children of tests that run in the background.
    heard = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = program(f"{heard}; print('ready', flush=True); time.sleep(60)")
    assert process.stdout
    process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (status, message)


@pytest.mark.parametrize(
    ("name", "handler", "status", "message"),
    [
        ("SIGINT", "signal.default_int_handler", 130, "interrupted\n"),
        ("SIGTERM", "lambda *_: sys.exit(143)", 143, ""),
    ],
)
def test_a_signal_during_garbage_collection_ends_the_command(
    name: str, handler: str, status: int, message: str
) -> None:
    """Python drops an exception that is raised in a callback of its garbage collector."""
    imports = "import gc, os, signal, time; from jaxret.cli.app import silence_libraries"
    setup = f"{imports}; signal.signal(signal.{name}, {handler})"
    interrupt = f"lambda phase, info: (gc.callbacks.clear(), signal.raise_signal(signal.{name}))"
    process = program(f"{setup}; silence_libraries(); gc.callbacks.append({interrupt}); gc.collect(); time.sleep(30)")
    _, errors = process.communicate(timeout=25)
    assert (process.returncode, errors) == (status, message)


@pytest.mark.slow
def test_a_process_does_not_wait_for_a_dead_peer_at_exit() -> None:
    """JAX would wait for it when Python exits: functions registered for the exit must not run."""
    gone = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:33690"
    reset = "UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Read error [127.0.0.1]:60141: Connection reset by peer"
    for message, more in ((gone, ""), (reset, ""), ("UNKNOWN: another error", "registered\n")):
        register = "import atexit, jax; atexit.register(print, 'registered')"
        kind = "ValueError" if message == reset else "jax.errors.JaxRuntimeError"
        process = program(f"{register}; print('said'); raise {kind}({message!r})")
        said, errors = process.communicate(timeout=60)
        assert (process.returncode, said) == (1, f"said\n{more}")
        assert errors.startswith("error: another process of this job is gone; run the same command ") == (not more)
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("body", ["print('x' * 100_000); print('y')", "print('short')"])
def test_a_closed_pipe_ends_the_command(body: str) -> None:
    process = program(f"import time; sys.stdin.readline(); {body}", stdin=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("go\n", timeout=30)
    assert (process.returncode, errors) == (141, "")


IMPORTS = """
import importlib, sys
from absl import flags
import jaxret.__main__, train, encode, search
import jaxret.experiments.explain_request, jaxret.experiments.rerank_request
import jaxret.experiments.searches.search_job, jaxret.index.encoding.encode_request
for verb in jaxret.__main__.VERBS:
    importlib.import_module(f"jaxret.cli.{verb.replace(' ', '_')}")
    for name in list(flags.FLAGS):  # two verbs in one process may call a flag the same
        delattr(flags.FLAGS, name)
print([m for m in ("jax", "flax", "transformers", "orbax", "faiss", "tqdm") if m in sys.modules])
"""


def test_nothing_is_imported_before_the_flags_are_right() -> None:
    """No verb imports JAX before its flags are checked, so that a mistake is reported at once."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_warnings_of_jax_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's warnings about an unused accelerator are kept; Orbax's reports of its work are hidden."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")  # `app` sets this variable, and monkeypatch restores it
    before = {name: logging.getLogger(name).level for name in ("jax._src", *cli._VERBOSE_LOGGERS)}
    try:
        with warnings.catch_warnings():
            cli.silence_libraries()
        assert logging.getLogger("jax._src.xla_bridge").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("jax._src.xla_bridge").isEnabledFor(logging.INFO)
        assert not logging.getLogger("absl").isEnabledFor(logging.WARNING)
        assert logging.getLogger("jaxret").isEnabledFor(logging.WARNING)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@pytest.mark.slow
def test_a_missing_platform_is_an_error(tmp_path: Path) -> None:
    untrained_run(tmp_path / "run", write_encoder(tmp_path / "encoder"), "")
    done = subprocess.run(
        command("search.py", f"--workdir={tmp_path / 'run'}", "--query=x"),
        cwd=REPOSITORY,
        env=environment() | {"JAX_PLATFORMS": "tpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: Unable to initialize backend 'tpu'")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.table
@pytest.mark.parametrize(
    ("script", "arguments", "setting"),
    [
        pytest.param(
            "train.py", (*MINILM, "--config.mesh.platform=gpu"), "mesh.platform", marks=pytest.mark.exhaustive
        ),
        ("encode.py", ("--workdir=nowhere", "--corpus=x", "--platform=gpu"), "--platform"),
        ("search.py", ("--workdir=nowhere", "--query=x", "--platform=gpu"), "--platform"),
    ],
)
def test_no_script_falls_back_to_the_cpu(script: str, arguments: tuple[str, ...], setting: str, tmp_path: Path) -> None:
    """The error comes before anything is read, and nothing is written."""
    done = subprocess.run(
        command(str(REPOSITORY / script), *(a.replace("configs/", f"{REPOSITORY}/configs/") for a in arguments)),
        cwd=tmp_path,
        env={name: value for name, value in environment().items() if name != "JAX_PLATFORMS"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    line = done.stderr.splitlines()[-1]
    assert re.match(rf"error: {setting} is 'gpu', but JAX reports: 8 of cpu \(cpu\). A GPU needs", line)
    assert line.endswith("requirements-gpu.txt")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function from environment variables to those of JAX that enable_compilation_cache sets."""

    def variables_set(**settings: str) -> dict[str, str]:
        for name in list(os.environ):
            if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT", "JAXRET_COMPILATION")):
                monkeypatch.delenv(name)
        for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), **settings}.items():
            monkeypatch.setenv(name, value)
        cli.enable_compilation_cache()
        names = [n for n in os.environ if n.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))]
        values = {name: os.environ[name] for name in names}
        for name in names:
            monkeypatch.delenv(name)  # also variables that enable_compilation_cache has set
        return values

    return variables_set


def test_location_of_the_compilation_cache(variables: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    assert variables() == {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache" / "jaxret" / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    inside = variables(XDG_CACHE_HOME="", HOME=str(tmp_path / "home"))
    assert inside["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "home" / ".cache" / "jaxret" / "compiled")
    assert variables(JAXRET_COMPILATION_CACHE="0") == {}
    assert variables(JAX_COMPILATION_CACHE_DIR="/mine") == {"JAX_COMPILATION_CACHE_DIR": "/mine"}
    (tmp_path / "file").touch()
    assert variables(XDG_CACHE_HOME=str(tmp_path / "file")) == {}, (
        "without a folder for the cache, programs are compiled as usual"
    )


@pytest.mark.skipif(os.cpu_count() == 1, reason="OpenBLAS starts threads if there are several cores")
def test_threads_of_numpy_sleep_when_there_is_no_work() -> None:
    program = (
        "from jaxret.cli.app import shorten_spinning; shorten_spinning(); import glob, os, time, numpy;"
        "time.sleep(0.3);"
        "threads = [file for file in glob.glob('/proc/self/task/*/schedstat') if f'/{os.getpid()}/' not in file];"
        # Nanoseconds that threads spent on a core.
        "print(len(threads), sum(int(open(file).read().split()[0]) for file in threads))"
    )
    user = {name: value for name, value in environment().items() if not name.startswith("OPENBLAS")}
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=user, capture_output=True, text=True)
    threads, nanoseconds = map(int, done.stdout.split())
    assert threads > 0
    assert nanoseconds < 5e6, "by default, threads would spin for 2e7 ns"


def test_the_interpreter_exits_without_collecting_garbage() -> None:
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000));"  # runs last
        "from jaxret.__main__ import main; sys.argv[1:] = ['cache']; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True)
    assert done.stdout.endswith(b"True\n"), done


@pytest.mark.table
@pytest.mark.parametrize("debug", ["", "1"])
def test_xla_logs_are_shown_only_for_debugging(debug: str) -> None:
    """The log here says that XLA cannot write to the requested folder."""
    program = (
        "from jaxret.cli.app import silence_libraries; silence_libraries(); import jax; jax.jit(lambda x: x + 1)(1.0)"
    )
    user = environment() | {"XLA_FLAGS": "--xla_dump_to=/dev/null/x", "JAXRET_DEBUG": debug}
    user.pop("TF_CPP_MIN_LOG_LEVEL", None)  # JAX sets it when it is imported
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=user, capture_output=True, text=True)
    assert done.returncode == 0
    assert ("Could not create directory" in done.stderr) is bool(debug), done.stderr


def test_a_working_directory_that_was_deleted_does_not_matter(tmp_path: Path) -> None:
    """Only relative paths need the working directory."""
    program = 'cd "$0" && rmdir "$0" && exec "$1" -m jaxret cache'
    variables = environment() | {"PYTHONPATH": str(REPOSITORY)}
    (tmp_path / "gone").mkdir()
    command = ["sh", "-c", program, str(tmp_path / "gone"), sys.executable]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
