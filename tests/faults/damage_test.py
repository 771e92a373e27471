"""Files that were changed: flipped, cut, lengthened, deleted, exchanged. Either an error names the file, or no result
depends on the change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus, QuerySource
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.shard_set import open_shards
from jaxret.runs.run import Run, open_checkpoints, open_run
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.checkpoint import leaf_digests
from jaxret.training import loop
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import vectors
from tests.faults.scripts import refusal, run

FOLDER = Path("embeddings") / "data"
REFUSALS = (ValueError, OSError, ArithmeticError)  # errors that the scripts report in one line


@dataclass
class Victim:
    """A run that is damaged, used, and repaired."""

    tiny: Tiny
    workdir: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    whole: dict[Path, bytes] = field(default_factory=dict)
    opened: Run | None = None
    expected: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shutil.rmtree(self.workdir / FOLDER)  # the tests repair it on as many devices
        self.opened = open_run(self.workdir)
        self.encode()
        self.texts()
        self.whole = {p.relative_to(self.workdir): p.read_bytes() for p in self.workdir.rglob("*") if p.is_file()}
        self.expected = {act.__name__: act() for act in (self.open, self.resume, self.search, self.texts, self.encode)}
        self.repair()

    def repair(self) -> None:
        for path in self.workdir.rglob("*"):
            if path.is_file() and path.relative_to(self.workdir) not in self.whole:
                path.unlink()
        for name, content in self.whole.items():
            path = self.workdir / name
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def open(self) -> Any:
        """Return the best and the last checkpoint, and the parameters of the best."""
        actual = open_run(self.workdir)
        with open_checkpoints(actual.workdir, actual.config) as checkpoints:
            return actual.checkpoint, checkpoints.last(), leaf_digests(actual.params)

    def resume(self) -> Any:
        """Resume training, and return its last step, and the leaves of its first state that differ from the saved ones.
        No step is left to train, unless a damaged checkpoint was set aside."""
        states: list[dict[str, str]] = []
        restore = loop.restore_state

        def noted(*arguments: Any) -> Any:
            state = restore(*arguments)
            states.append(leaf_digests({"params": state.params, "opt_state": state.opt_state, "step": state.step}))
            return state

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "restore_state", noted)
            done = loop.train(self.tiny.config(**self.overrides), self.workdir, progress=False)
        (restored,) = states
        saved = json.loads(self.whole[Path(f"checkpoints/{done.resumed_from}/_CHECKPOINT_METADATA")])["custom_metadata"]
        digests = {name.removeprefix("progress/"): digest for name, digest in saved["digests"].items()}
        return done.step, [name for name, digest in restored.items() if digests[name] != digest]

    def search(self) -> Any:
        """Return the rankings and scores of all test queries."""
        assert self.opened is not None
        queries = QuerySource.open(self.tiny.data).read()
        return Searcher(self.opened, self.workdir / FOLDER, SearchOptions("xla")).search(queries, 10).rankings

    def texts(self) -> Any:
        """Return the texts that are shown for some passages."""
        assert self.opened is not None
        return Searcher(self.opened, self.workdir / FOLDER, SearchOptions("xla")).texts.read(["p1", "n30", "o5"])

    def encode(self) -> Any:
        """Return the folder of vectors after encoding again, which repairs damage."""
        assert self.opened is not None
        encode_corpus(self.opened, Corpus.open(self.tiny.data), progress=False)
        actual = vectors(self.workdir / FOLDER)
        return {name: content.strip() if name.endswith(".json") else content for name, content in actual.items()}

    def trial(self, trials: Trials, what: str, path: Path, act: Callable[[], Any], names: bool = True) -> bool:
        """Use a damaged run once; return whether it was refused. A refusal must name the file, or a folder in the run
        with the file."""
        try:
            actual = act()
        except REFUSALS as error:
            near = [path, *path.parents[: len(path.relative_to(self.workdir).parts) - 1]]
            named = not names or any(str(place) in str(error) for place in near)
            trials.count(named, f"{what}: no file named in {type(error).__name__}: {error}", detected=True)
            return True
        except Exception as error:
            trials.count(False, f"{what}: {type(error).__name__}: {error}")
            return True
        trials.count(actual == self.expected[act.__name__], f"{what}: accepted, and {act.__name__} differs")
        return False

    def look(self, trials: Trials, what: str, path: Path, acts: tuple[str, ...]) -> None:
        """Use the damaged run in one way after another, until one is refused; count all of them as one trial."""
        for place, act in enumerate(acts):
            counted = trials.survived
            refused = self.trial(trials, what, path, getattr(self, act))
            if refused or len(trials.lost) or place == len(acts) - 1:
                break
            trials.survived = counted
        self.repair()

    def files(self, pattern: str) -> list[Path]:
        return sorted(p for p in self.workdir.glob(pattern) if p.is_file() and p.stat().st_size)


@pytest.fixture(scope="module")
def fixed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    workdir = tmp_path_factory.mktemp("damage") / "run"
    shutil.copytree(tiny.run, workdir)
    return Victim(tiny, workdir)


@pytest.fixture(scope="module")
def ragged(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    workdir = tmp_path_factory.mktemp("ragged") / "run"
    overrides = {"head__name": "colbert", "head__colbert__late": True, "train__steps": 1}
    done = run("train.py", *tiny.training(workdir, **overrides))
    assert done.returncode == 0, done.output
    (workdir / FOLDER).mkdir(parents=True)
    return Victim(tiny, workdir, overrides)


# The number of flips, the files, and the ways to use them.
OPENED = ("open", "resume")
CHECKPOINT = "checkpoints/*/"
FLIPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "config.json": (12, OPENED),
    "contract.json": (8, OPENED),
    "data.json": (8, OPENED),
    "parameters.json": (8, OPENED),
    "seal.json": (8, OPENED),
    "encoder/config.json": (16, OPENED),
    "encoder/tokenizer.json": (10, OPENED),
    "encoder/tokenizer_config.json": (10, OPENED),
    "metrics.jsonl": (6, ("resume",)),
    CHECKPOINT + "params/d/*": (20, OPENED),
    CHECKPOINT + "params/ocdbt*/**/*": (10, OPENED),
    CHECKPOINT + "params/*": (8, OPENED),
    CHECKPOINT + "progress/d/*": (14, ("resume",)),
    CHECKPOINT + "progress/ocdbt*/**/*": (6, ("resume",)),
    CHECKPOINT + "progress/*": (6, ("resume",)),
    CHECKPOINT + "metrics/*": (10, OPENED),
    CHECKPOINT + "_CHECKPOINT_METADATA": (8, OPENED),
    f"{FOLDER}/manifest.json": (14, ("search", "encode")),
    f"{FOLDER}/vectors-*": (8, ("search", "encode")),
    f"{FOLDER}/ids-*": (8, ("search", "encode")),
    f"{FOLDER}/shard-*": (8, ("search", "encode")),
    f"{FOLDER}/corpus.json": (6, ("texts", "encode")),
    f"{FOLDER}/passages.*": (6, ("texts", "encode")),
}
RAGGED = {
    f"{FOLDER}/manifest.json": (4, ("search", "encode")),
    f"{FOLDER}/vectors-*": (4, ("search", "encode")),
    f"{FOLDER}/offsets-*": (10, ("search", "encode")),
    f"{FOLDER}/shard-*": (4, ("search", "encode")),
}
assert sum(count for table in (FLIPS, RAGGED) for count, _ in table.values()) >= 200


def flip(victim: Victim, trials: Trials, pattern: str, count: int, acts: tuple[str, ...]) -> None:
    random = np.random.default_rng(sum(pattern.encode()))
    for _ in range(count):
        path = random.choice(np.array(victim.files(pattern), object))
        content = bytearray(path.read_bytes())
        place, bit = int(random.integers(len(content))), int(random.integers(8))
        content[place] ^= 1 << bit
        path.write_bytes(content)
        victim.look(trials, f"{path.relative_to(victim.workdir)}: bit {bit} of byte {place}", path, acts)


@pytest.mark.faults(5)
@pytest.mark.parametrize("pattern", FLIPS)
def test_flips(pattern: str, fixed: Victim, trials: Trials) -> None:
    flip(fixed, trials, pattern, *FLIPS[pattern])


@pytest.mark.faults(5)
@pytest.mark.parametrize("pattern", RAGGED)
def test_flips_of_lists(pattern: str, ragged: Victim, trials: Trials) -> None:
    flip(ragged, trials, pattern, *RAGGED[pattern])


@pytest.mark.faults(5)
def test_flips_as_a_user_sees_them(tiny: Tiny, fixed: Victim, trials: Trials) -> None:
    """Valid values, which only a digest can show as wrong."""
    part = FOLDER / "vectors-00002-of-00023.npy"
    search = ["search.py", f"--workdir={fixed.workdir}", "--query=river stone"]
    for name, old, new, arguments in (
        ("encoder/config.json", b"1e-12", b"1e-02", search),
        ("encoder/config.json", b'"num_attention_heads": 4', b'"num_attention_heads": 2', search),
        ("encoder/tokenizer_config.json", b"[CLS]", b"[PAD]", search),
        (str(part), fixed.whole[part][-4:], b"1234", search),
        ("config.json", b"0.001", b"0.003", ["train.py", *tiny.training(fixed.workdir, train__steps=4)]),
    ):
        path = fixed.workdir / name
        assert path.read_bytes().count(old), name
        path.write_bytes(path.read_bytes().replace(old, new))
        done = run(*arguments)
        trials.count(str(path) in refusal(done), f"{name} {old!r} -> {new!r}: {done.output}", detected=True)
        fixed.repair()


@pytest.mark.faults(6)
@pytest.mark.parametrize(
    "pattern",
    [
        "config.json",
        "contract.json",
        "data.json",
        "encoder/config.json",
        "encoder/tokenizer.json",
        CHECKPOINT + "params/d/*",
        CHECKPOINT + "params/manifest.ocdbt",
        CHECKPOINT + "progress/d/*",
        CHECKPOINT + "_CHECKPOINT_METADATA",
        f"{FOLDER}/manifest.json",
        f"{FOLDER}/vectors-00003*",
        f"{FOLDER}/ids-00003*",
        f"{FOLDER}/shard-00003*",
    ],
)
def test_lengths(pattern: str, fixed: Victim, trials: Trials) -> None:
    path = fixed.files(pattern)[-1]
    content = path.read_bytes()
    acts = ("search", "encode") if "embeddings" in pattern else ("resume",) if "progress" in pattern else OPENED
    for what, changed in {
        "empty": b"",
        "a byte": content[:1],
        "64 bytes": content[:64],
        "half": content[: len(content) // 2],
        "all but a byte": content[:-1],
        "more": content + b"junk",
    }.items():
        path.write_bytes(changed)
        fixed.look(trials, f"{path.relative_to(fixed.workdir)}, {what}", path, acts)


def exchange(one: Path, two: Path) -> None:
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


@pytest.mark.faults(7)
def test_shards(fixed: Victim, trials: Trials) -> None:
    """Search refuses damaged shards, and encoding again restores every file."""
    folder = fixed.workdir / FOLDER
    third, fourth = "-00003-of-00023", "-00004-of-00023"
    numbers, ids, sidecar = f"vectors{third}.npy", f"ids{third}.txt", f"shard{third}.json"
    other = {numbers: f"vectors{fourth}.npy", ids: f"ids{fourth}.txt", sidecar: f"shard{fourth}.json"}
    changes: dict[str, Callable[[], object]] = {
        "vectors deleted": lambda: (folder / numbers).unlink(),
        "ids deleted": lambda: (folder / ids).unlink(),
        "a shard deleted": lambda: list(map(Path.unlink, (folder / name for name in other))),
        "vectors exchanged": lambda: exchange(folder / numbers, folder / other[numbers]),
        "ids exchanged": lambda: exchange(folder / ids, folder / other[ids]),
        "shards exchanged": lambda: list(
            map(exchange, map(folder.joinpath, other), map(folder.joinpath, other.values()))
        ),
        "a shard there twice": lambda: [shutil.copyfile(folder / o, folder / n) for n, o in other.items()],
    }
    for what, change in changes.items():
        change()
        with pytest.raises(REFUSALS) as refused:
            fixed.search()
        named = any(str(folder / name) in str(refused.value) for pair in other.items() for name in pair)
        trials.count(named, f"{what}: {refused.value}", detected=True)
        trials.count(fixed.encode() == fixed.expected["encode"], f"{what}: encoding again does not repair it")
        fixed.repair()
    (folder / sidecar).unlink()  # only encoding jobs read the sidecar of a shard
    trials.count(fixed.search() == fixed.expected["search"], "without a sidecar: another ranking")
    trials.count(fixed.encode() == fixed.expected["encode"], "a sidecar deleted: encoding again does not repair it")
    fixed.repair()
    (folder / "manifest.json").unlink()
    with pytest.raises(REFUSALS, match=r"manifest\.json does not exist"):
        open_shards(folder)
    trials.count(fixed.encode() == fixed.expected["encode"], "no manifest: encoding again does not repair it")
    fixed.repair()
