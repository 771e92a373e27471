"""One command for all verbs, and configs by their names, from any folder and from an installed wheel."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import ModuleType

import pytest
from absl import flags

from jaxret import configs
from jaxret.__main__ import overview, split_verb
from jaxret.cli import app as cli
from jaxret.cli.verbs import VERBS
from jaxret.runs.mismatch import flatten
from tests.pipeline import REPOSITORY, command, environment, write_encoder

COMMANDS = REPOSITORY / "jaxret" / "cli"
# Module -> flags whose type, default or meaning differs in it.
OWN_MEANING = {
    "beir_job": {"name"},
    "compare": {"measures"},
    "data_check": {"on_error"},
    "data_split": {"qrels"},
    "decoding_options": {"queries", "query_length"},
    "demo": {"workdir"},
    "doctor": {"workdir"},
    "encode_request": {"name"},
    "evaluation_options": {"on_error"},
    "fuse_job": {"k", "measures"},
    "generation_options": {"passage_length", "tokens_per_batch"},
    "mteb_request": {"download"},
    "picture_options": {"measures"},
    "plot": {"out"},
    "print_plans": {"queries"},
    "probe_options": {"queries"},
    "report": {"out"},
    "report_options": {"measures", "queries"},
    "reproduce": {"workdir"},
    "rerank_request": {"k", "split", "workdir"},
    "search_job": {"k"},
    "search_options": {"checkpoint", "name", "qrels", "queries"},
    "store_options": {"k"},
}
NO_CHIP = "--topology=v9:1"  # the first error of `plan` after it reads the config
MINE = """from jaxret.configs.mlr import get_config as mlr


def get_config():
    config = mlr()
    config.train.steps = 7
    return config
"""


def runs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder outside the repository, with the repository's jaxret."""
    variables = environment() | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def verb_files() -> list[Path]:
    """Return the modules of verbs."""
    machinery = {"__init__", "app", "interactive", "verbs", "shared_flags", "flags"}
    return [path for path in COMMANDS.glob("*.py") if path.stem not in machinery]


def test_every_verb_is_a_module_with_help_and_flags() -> None:
    modules = {path.stem.replace("_", " "): ast.parse(path.read_text()) for path in verb_files()}
    assert modules.keys() == VERBS.keys()
    for verb, tree in modules.items():
        assert f"jaxret {verb} " in (ast.get_docstring(tree) or ""), "its help shows how to call it"
        assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_verb_is_flags_and_one_call() -> None:
    """Logic belongs to the package of its subject: the file of a verb is short, and has only `main` and parsers of
    flags."""
    for path in verb_files():
        lines = path.read_text().splitlines()
        assert len(lines) <= 120, path
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "main":
                assert node.name.startswith("_"), f"{path}: {node.name}"
                assert (node.end_lineno or 0) - node.lineno < 10, f"{path}: {node.name} is more than a parser"


def test_flags_of_several_verbs_are_defined_once() -> None:
    """They are in configs/shared_options.py, or, if they are not options of a dataclass, in cli/shared_flags.py."""
    flag, field = re.compile(r'DEFINE_\w+\(\s*"(\w+)"'), re.compile(r"^    (\w+): .* = option\(", re.MULTILINE)
    package = COMMANDS.parent
    shared = set(re.findall(r'flag="(\w+)"', (package / "configs/shared_options.py").read_text()))
    shared |= set(flag.findall((COMMANDS / "shared_flags.py").read_text()))
    defined: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        if path.stem != "shared_flags" and (names := shared.intersection(flag.findall(text) + field.findall(text))):
            defined[path.stem] = names
    assert defined == OWN_MEANING


def test_the_verb_is_parsed_from_the_command_line() -> None:
    assert split_verb(["data", "check", "x", "--lengths=3"]) == ("data check", ["x", "--lengths=3"])
    assert split_verb(["plan", "encode", "x"]) == ("plan", ["encode", "x"])
    assert split_verb(["train"]) == ("train", [])


def test_help_lists_the_verbs(tmp_path: Path) -> None:
    done = runs(tmp_path, sys.executable, "-m", "jaxret", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == overview() + "\n"
    assert all(f"  {verb} " in done.stdout for verb in VERBS)
    done = runs(tmp_path, sys.executable, "-m", "jaxret", "data", "--help")
    assert "  data check " in done.stdout
    assert "  train " not in done.stdout, "the help of a group has only its own verbs"


def test_help_lists_positional_arguments() -> None:
    done = subprocess.run(
        command("-m", "jaxret", "open", "x", "-h"), cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Arguments:\n  MODEL " in done.stdout
    assert "--workdir=       new folder of the run [required]" in done.stdout
    assert "--download=      download a model that is not in the local cache of Hugging Face [False]" in done.stdout
    assert "mean for T5 and a bidirectional one\n" in done.stdout, "an optional flag is not required"


def test_help_names_flags_that_may_be_repeated() -> None:
    done = subprocess.run(
        command("-m", "jaxret", "beir", "-h"), cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert "NAME=FOLDER names it; may be repeated\n" in done.stdout
    assert "repeat this option" not in done.stdout


def test_repeated_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = ModuleType("several"), ModuleType("one")
    several.ARGUMENTS, one.ARGUMENTS = {"RUN...": "runs"}, {"DIR": "a folder"}  # type: ignore[attr-defined]
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    assert cli.parse_flags(several, ["runs/a", "runs/b", "runs/c"]) == ["runs/a", "runs/b", "runs/c"]
    with pytest.raises(ValueError, match=r"RUN\.\.\. must be given"):
        cli.parse_flags(several, [])
    with pytest.raises(ValueError, match="unexpected argument 'y'"):
        cli.parse_flags(one, ["x", "y"])


def test_a_config_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = configs.load_config("mlr")
    assert by_name.head.name == "mlr"
    assert by_name.is_locked
    assert (
        configs.load_config("configs/mlr.py") == by_name == configs.load_config(str(REPOSITORY / "configs" / "mlr.py"))
    )
    assert (
        configs.load_config("minilm:dual_encoder").head.name
        == "dual_encoder"
        != configs.load_config("minilm").head.name
    )
    assert configs.load_config("recipes/mlr_open_qa:t5") == configs.load_config("configs/recipes/mlr_open_qa.py:t5")
    (tmp_path / "mine.py").write_text(MINE)
    mine, mlr = flatten(configs.load_config("mine.py").to_dict()), flatten(by_name.to_dict())
    assert {key for key in mlr if mine[key] != mlr[key]} == {"train.steps"}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mlr.py").write_text(MINE.replace("mlr", "me_bert"))
    assert configs.load_config("configs/mlr.py").train.steps == 7, "an existing file takes precedence"
    assert configs.load_config("mlr") == by_name, "a name always means the shipped config"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "minilmm",
            "--config=minilmm: there is no file 'minilmm' that ends in .py, and .*; did you mean minilm?",
        ),
        ("configs/mlr", "did you mean configs/mlr.py?"),
        ("", "there is no file '' .*aggretriever, base, "),
        ("nowhere/at/all.py", "there is no file 'nowhere/at/all.py'"),
        ("minilm:mrl", "configs/minilm.py:mrl: the suffix must be one of"),
        ("mlr:x", "mlr takes no suffix: remove ':x'"),
    ],
)
def test_a_missing_config(config: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        configs.load_config(config)


@pytest.mark.parametrize(
    "config", [("--config=recipes/mlr_open_qa:t5",), ("--config", "configs/mlr.py"), ("--config=mine.py",)]
)
def test_a_config_is_found_from_any_folder(config: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = runs(tmp_path, *command("-m", "jaxret", "plan", *config, NO_CHIP, "--config.train.steps=3"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: --topology=v9:1: 'v9' is not a known chip")


@pytest.mark.exhaustive
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    """It is built from the repository, and runs in an environment with the libraries but without the repository."""
    source, wheels, home = tmp_path / "source", tmp_path / "wheels", tmp_path / "venv"
    source.mkdir()
    shutil.copytree(REPOSITORY / "jaxret", source / "jaxret", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements-base.txt"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(source)], check=True)
    (wheel,) = wheels.iterdir()
    shutil.rmtree(source)
    venv.create(home, symlinks=True)
    subprocess.run([*pip, "--python", str(home / "bin" / "python"), "install", *offline, str(wheel)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))

    alone = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program, *rest = arguments
        return subprocess.run(
            [str(home / "bin" / program), *rest], cwd=tmp_path, env=alone, capture_output=True, text=True
        )

    where = run("python", "-c", "import jaxret; print(jaxret.__file__)")
    assert where.stdout == f"{site / 'jaxret' / '__init__.py'}\n", where.stderr
    assert run("jaxret", "-h").stdout == overview() + "\n"
    (tmp_path / "mine.py").write_text(MINE)
    for config in ("mlr", "configs/mlr.py", "recipes/mlr_open_qa:t5", "mine.py"):
        assert "'v9' is not a known chip" in run("jaxret", "plan", f"--config={config}", NO_CHIP).stderr, config
    assert (site / "jaxret" / "py.typed").is_file()
    assert not (site / "configs").exists(), "the wheel installs nothing outside the package"
    (write_encoder(tmp_path / "encoder") / "model.safetensors").unlink()
    opened = run("jaxret", "open", "encoder", "--workdir=opened")
    assert "error: " in opened.stderr, "control: this encoder has no weights"
