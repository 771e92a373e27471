"""`jaxret generate`: queries of a T5 for a corpus, in parts that survive kill -9, and the files made from them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxret.data.formats import Corpus, Policy, QuerySource, TrainingSource, write_beir
from jaxret.data.records import Passage
from jaxret.data.tokens.backend import load_backend
from jaxret.mining.generate_queries import GenerationJob, generate_queries
from jaxret.mining.generation_options import GenerationOptions
from jaxret.mining.generation_outputs import GeneratedQueries, write_expanded_corpus
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.parallel.mesh import make_mesh
from jaxret.runs.query_generator import PromptTokenizer, open_query_generator
from jaxret.storage.leases import Leases
from tests.pipeline import REPOSITORY, WORDS, command, contents, environment, run_script, words, write_generator
from tests.storage.buckets.servers import finish, gcs_server, start

PROMPT = "music {passage} river"
SAMPLES = DecodingOptions(queries=3, query_length=6, top_k=0)
SETTINGS = GenerationOptions(prompt=PROMPT, passage_length=24, part_rows=4)
FLAGS = ("--queries=3", "--query_length=6", "--top_k=0", f"--prompt={PROMPT}", "--passage_length=24", "--part_rows=4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_generator(tmp_path_factory.mktemp("generator"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    passages = [
        Passage(f"p{i}", words(random, int(random.integers(1, 30))), WORDS[i % 18] if i % 2 else "") for i in range(22)
    ]
    folder = tmp_path_factory.mktemp("corpus") / "data"
    write_beir(folder, passages, [], {})
    return folder


def parts(folder: Path) -> dict[str, bytes]:
    return contents(folder / "parts")


@pytest.mark.slow
def test_files_of_all_kinds(model: Path, corpus: Path, tmp_path: Path) -> None:
    out, every = tmp_path / "out", ("pseudo_queries", "training", "expanded")
    result = generate_queries(model, Corpus.open(corpus), out, SAMPLES, replace(SETTINGS, write=every))
    assert (result.passages, result.parts, result.parts_written) == (22, 6, 6)
    passages = list(Corpus.open(corpus).read())
    generated = {
        key: texts
        for path in sorted((out / "parts").iterdir())
        for key, texts in json.loads(path.read_text())["queries"]
    }
    assert list(generated) == [passage.id for passage in passages]
    assert result.queries == sum(map(len, generated.values())) > 30
    assert all(len(set(texts)) == len(texts) <= 3 for texts in generated.values())

    first = {query.id: query.text for query in QuerySource.open(out / "pseudo-queries.jsonl").read()}
    assert first == {key: texts[0] for key, texts in generated.items() if texts}
    examples = list(TrainingSource.open(out / "training", "train").read())
    assert {(e.query.text, e.positives[0]) for e in examples} == {
        (text, passage) for passage in passages for text in generated[passage.id]
    }
    expanded = list(Corpus.open(out / "expanded").read())
    assert expanded == [replace(p, text=" ".join([p.text, *generated[p.id]])) for p in passages]

    again = generate_queries(model, Corpus.open(corpus), out, SAMPLES, SETTINGS)
    assert (again.parts_written, again.programs) == (0, 0), "nothing is generated again"


def test_queries_of_a_passage_without_text_are_its_text(tmp_path: Path) -> None:
    write_beir(tmp_path / "data", [Passage("p", "", "stone"), Passage("q", "river", "")], [], {})
    corpus = Corpus.open(tmp_path / "data")
    read = partial(iter, [("p", ["one", "two"]), ("q", ["three"])])
    write_expanded_corpus(GeneratedQueries(corpus, corpus.scan(Policy()), "error", read), tmp_path, tmp_path)
    expanded = Corpus.open(tmp_path / "expanded").read()
    assert [passage.text for passage in expanded] == ["one two", "river three"]


@pytest.mark.slow
def test_jobs_share_the_parts_of_a_folder_in_a_bucket(model: Path, corpus: Path, tmp_path: Path) -> None:
    out = "gs://bucket/generated"
    with gcs_server() as (server, clients):
        generate = ("-m", clients, "jaxret", "generate", f"--model={model}", f"--corpus={corpus}", *FLAGS)
        jobs = [start(*generate, f"--out={folder}") for folder in (out, out, tmp_path / "disk")]
        assert all("of 22 passages" in output for output in map(finish, jobs))
        names = [name for _, name in server.requests]
        assert {f"generated/leases/part-{number}.json" for number in range(6)} <= set(names)
        assert not any("/leases/" in name or "/groups/" in name for _, name in server.objects), (
            "all files are in files.json"
        )
        finish(start("-m", clients, "jaxret", "copy", out, str(tmp_path / "copy")))
    assert contents(tmp_path / "copy") == contents(tmp_path / "disk")


def test_a_job_that_waits_for_others_reads_no_corpus(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = Corpus.open(corpus), tmp_path / "out"
    scan = source.scan()
    monkeypatch.setattr(Corpus, "read", lambda *_: pytest.fail("the corpus was read"))
    with Leases(out) as theirs, Leases(out) as own:
        job = GenerationJob(tmp_path, source, scan, SAMPLES, SETTINGS, own)
        assert all(theirs.claim(f"part-{number}") for number in range(len(job.parts)))
        (out / "parts").mkdir()

        def others_finish(_: float) -> None:
            for part in job.parts:
                part.touch()

        monkeypatch.setattr(time, "sleep", others_finish)
        job.fill()
    assert (job.parts_written, len(job.parts)) == (0, 6)


@pytest.mark.slow
def test_a_killed_job_continues_to_the_same_bytes(model: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = ["jaxret", "generate", f"--model={model}", f"--corpus={corpus}", *FLAGS, "--write=training"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    done = run_script("-m", *arguments, f"--out={whole}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2].endswith(" of 22 passages")
    assert lines[-1] == f"written: {whole / 'training'}"

    process = subprocess.Popen(
        [*command("-m", *arguments), f"--out={out}"],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list((out / "parts").glob("*.json")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = parts(out)
    assert 0 < len(written) < 6
    done = run_script("-m", *arguments, f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(whole)
    assert written.items() <= parts(out).items()


@pytest.mark.daily("beam")
@pytest.mark.slow
@pytest.mark.parametrize(
    "decoding",
    [SAMPLES, pytest.param(DecodingOptions("beam", queries=2, beams=3, query_length=6), marks=pytest.mark.exhaustive)],
    ids=lambda decoding: decoding.method,
)
def test_eight_devices_generate_the_queries_of_one(model: Path, corpus: Path, decoding: DecodingOptions) -> None:
    passages = list(Corpus.open(corpus).read())

    def queries(devices: int, decoding: DecodingOptions) -> list[list[str]]:
        mesh = make_mesh(devices=jax.devices()[:devices])
        generator = open_query_generator(model, PROMPT, 24, decoding, "float32", 512, mesh)
        return generator(passages, 0)[0]

    eight = queries(8, decoding)
    assert eight == queries(1, decoding)
    if decoding.method == "sample":
        assert eight != queries(8, replace(decoding, seed=1)), "control: another seed gives other queries"


@pytest.mark.slow
def test_queries_equal_those_of_transformers(model: Path, corpus: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    original = transformers.T5ForConditionalGeneration.from_pretrained(model).eval()
    backend, _ = load_backend(model)
    passages = [passage for passage in Corpus.open(corpus).read() if len(passage.text.split()) < 12]
    decoding = DecodingOptions("beam", queries=2, beams=3, query_length=6)
    generator = open_query_generator(model, PROMPT, 24, decoding, "float32", 512, make_mesh())
    generated, cut = generator(passages, 0)
    assert cut == 0
    assert len(passages) > 5
    for passage, texts in zip(passages, generated, strict=True):
        prompt = PROMPT.replace("{passage}", f"{passage.title} {passage.text}".strip())
        ids = [*backend.encode(prompt, add_special_tokens=False).ids, 1]
        sequences = original.generate(
            torch.tensor([ids]), num_beams=3, num_return_sequences=2, max_new_tokens=6, do_sample=False
        )
        expected = [backend.decode(row.tolist(), skip_special_tokens=True) for row in sequences]
        assert texts == [text for text in dict.fromkeys(" ".join(text.split()) for text in expected) if text]


@pytest.mark.slow
def test_a_long_passage_is_cut_and_the_prompt_is_not(model: Path) -> None:
    backend, _ = load_backend(model)
    ids = {word: backend.encode(word, add_special_tokens=False).ids for word in ("music", "river", "stone", "light")}
    prompts = PromptTokenizer(backend, PROMPT, 10, end_id=1)
    cut_ids, cut = prompts(Passage("a", "stone light " * 50, "light"))
    assert cut
    assert len(cut_ids) == 10
    assert cut_ids == [*ids["music"], *ids["light"], *[*ids["stone"], *ids["light"]] * 3, *ids["river"], 1]
    assert prompts(Passage("a", "stone")) == ([*ids["music"], *ids["stone"], *ids["river"], 1], False)
    long_title = prompts(Passage("a", "stone", "light " * 30))
    assert long_title == ([*ids["music"], *ids["light"] * 7, *ids["river"], 1], True)
    spelled = PromptTokenizer(backend, "{title} river {text}", 10, end_id=1)(Passage("a", "stone", "{text}"))
    assert spelled[0][-2:] == [*ids["stone"], 1]
    assert spelled[0].count(ids["stone"][0]) == 1, "a title that looks like a field is not changed"


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused(model: Path, corpus: Path, tmp_path: Path) -> None:
    generate_queries(model, Corpus.open(corpus), tmp_path / "out", SAMPLES, SETTINGS)
    before = contents(tmp_path / "out")
    others: list[tuple[dict[str, Any], str]] = [
        ({"decoding": replace(SAMPLES, seed=5)}, r"decoding.seed 0, and this command has 5"),
        ({"options": replace(SETTINGS, prompt="{text}")}, r"generation.prompt 'music .*and this command has '{text}'"),
    ]
    for values, message in others:
        arguments: dict[str, Any] = {"decoding": SAMPLES, "options": SETTINGS} | values
        with pytest.raises(ValueError, match=message):
            generate_queries(model, Corpus.open(corpus), tmp_path / "out", **arguments)
    assert contents(tmp_path / "out") == before
    part = tmp_path / "out" / "parts" / "0000002.json"
    part.write_text(part.read_text().replace("p8", "q8"))
    with pytest.raises(ValueError, match=r"0000002.json: damaged"):
        generate_queries(model, Corpus.open(corpus), tmp_path / "out", SAMPLES, SETTINGS)
    part.unlink()
    generate_queries(model, Corpus.open(corpus), tmp_path / "out", SAMPLES, SETTINGS)
    assert contents(tmp_path / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--model=nowhere",), "--model=nowhere is not a folder; `hf download NAME"),
        (("--prompt=music",), "the prompt 'music' has no passage; it must have one of {passage}, {title}, {text}"),
        (("--passage_length=3",), "the prompt takes 4 tokens, which leaves none of 3 for a passage"),
        (("--write=anything",), "write is 'anything'; it must be one of 'pseudo_queries', 'training', 'expanded'"),
        (("--method=greedy",), "queries is 3; greedy decoding returns one query"),
    ],
)
def test_a_mistake_is_one_sentence(
    model: Path, corpus: Path, tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    arguments = (f"--model={model}", f"--corpus={corpus}", f"--out={tmp_path / 'out'}", *FLAGS, *changes)
    done = run_script("-m", "jaxret", "generate", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "out" / "generation.json").exists(), "it must not refuse other settings later"
