"""Reports of runs: their contents, escaped texts, equal bytes, and missing data."""

from __future__ import annotations

import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import Corpus, QuerySource
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.evaluation.evaluation_report import read_evaluation
from jaxret.experiments.pictures.canvas import picture_svg
from jaxret.experiments.report.html import NumberCell, as_html, data_table, tag, value_cell
from jaxret.experiments.report.report_options import ReportOptions
from jaxret.experiments.report.report_pictures import cost_picture
from jaxret.experiments.report.run_files import ReportFiles
from jaxret.experiments.report.set_texts import winning_vectors
from jaxret.experiments.report.write_report import run_folders, write_report
from jaxret.models.heads.head import Side
from jaxret.runs.embedder import Embedder
from jaxret.runs.run_warnings import RunWarning, keep_warnings
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, write_json
from tests.experiments.report.conftest import QUESTION, TITLE
from tests.pipeline import run_script, untrained_run, write_data, write_encoder

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")

SECTIONS = (
    *("overview", "configs", "training", "throughput", "quality", "layers"),
    *("winners", "cost", "queries", "warnings", "origin"),
)
VOID = {"meta", "link"}


class Page(HTMLParser):
    """A parsed page: its tags, the text of each section, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.open: list[str] = []
        self._section = ""
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name == "section":
            self._section = str(dict(attributes)["id"])
            self.sections[self._section] = ""
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name
        if name == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section] += data

    def of(self, name: str) -> list[dict[str, str | None]]:
        """Return the attributes of every element with a name."""
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([str(runs / "dual"), str(runs / "layers")], out)
    return Page(out.read_text())


def test_every_section_shows_its_numbers(page: Page, runs: Path) -> None:
    assert tuple(page.sections) == SECTIONS
    assert page.open == []
    shown = page.sections
    mean = read_evaluation(runs / "layers" / "eval" / "data.test.json").mean
    assert all(f"{value:.4f}" in shown["quality"] for value in mean.values())
    assert "head.mlr.chosen" in shown["configs"].partition("The other")[0]
    assert "encoder.tied" in shown["configs"].partition("The other")[2]
    assert "Training loss" in shown["training"]
    assert "Learning rate" in shown["training"]
    assert "Dev RR@10" in shown["training"]
    assert "Share of the time that devices wait for data" in shown["throughput"]
    assert "dual, data.test" in shown["layers"]
    findings = read_json(runs / "dual" / "eval" / "data.test.probe.json")["findings"]
    assert [f"{one['vectors']}{one['bytes_per_passage']:,}" in shown["layers"] for one in findings] == [True] * 5
    wins = read_json(runs / "layers" / "eval" / "data.test.diversity.json")["wins"]
    assert all(name in shown["winners"] for name in wins)
    assert "Quality against storage" in shown["cost"]
    assert "Quality against latency" in shown["cost"]


def test_a_query_shows_both_texts_and_the_winning_vector(page: Page, runs: Path) -> None:
    shown = page.sections["queries"]
    values = [
        read_evaluation(runs / name / "eval" / "data.test.json").per_query["nDCG@10"] for name in ("dual", "layers")
    ]
    wins = sum(values[1][query] > values[0][query] for query in values[0])
    losses = sum(values[1][query] < values[0][query] for query in values[0])
    assert wins + losses > 0
    assert f"layers against dual: {wins} wins, {losses} losses" in shown
    assert re.search(r"layer [13] won", shown)
    assert "relevant" in shown


def test_the_winning_vector_is_that_of_the_search(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the search's lengths of texts, size of vectors, and instructions of queries."""
    run = ReportFiles((str(runs / "layers"),)).runs[0]
    run.results["data.test"]["provenance"]["search"] |= {"query_length": 4, "passage_length": 5, "dimension": 3}
    shapes: list[tuple[int, ...]] = []
    embed = Embedder.__call__

    def spy(self: Embedder, texts: Any, side: Side, *more: Any) -> Any:
        vectors = embed(self, texts, side, *more)
        shapes.append((int(texts.lengths.max()), vectors.stacked().shape[-1]))
        return vectors

    monkeypatch.setattr(Embedder, "__call__", spy)
    tokenized: list[Any] = []
    tokenize = TextTokenizer.queries

    def spy_texts(self: TextTokenizer, texts: Any) -> Any:
        tokenized.append(texts)
        return tokenize(self, texts)

    monkeypatch.setattr(TextTokenizer, "queries", spy_texts)
    queries, passages = QuerySource.open(runs / "data").read(), list(Corpus.open(runs / "data").read())
    winners = winning_vectors(run, "data.test", queries, {query.id: passages for query in queries})
    assert set(winners.values()) <= set(run.vector_names)
    assert shapes == [(4, 3), (5, 3)]
    assert tokenized == [queries], "the whole queries, not only their texts"


def test_warnings_of_jobs_and_of_the_data(page: Page) -> None:
    shown = page.sections["warnings"]
    assert re.search(r"train: \d+ passages: \d+\.\d% cut at 24 tokens, .* \(dual, layers\)", shown)
    assert re.search(r"encode data: [\d,]+ passages: \d+\.\d% cut .* \(dual, layers\)", shown)
    assert re.search(r"search data\.test: \d+ queries: \d+\.\d% cut at 12 tokens, .* \(dual, layers\)", shown)
    assert re.search(r"\d+ of \d+ queries of data\.test are in .*data \(train\), which dual, layers trained on", shown)
    assert "1 of 117 passages have the text of another one" in shown


def test_texts_are_escaped(page: Page) -> None:
    """A passage or query that looks like HTML creates no element."""
    assert len(page.of("script")) == 1
    assert page.of("img") == []
    assert TITLE in page.sections["queries"]
    assert QUESTION in page.sections["queries"]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert as_html("<b>") == "&lt;b&gt;"
    assert tag("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    table = data_table("<i>", ["<u>", "n"], [["<s>", value_cell(0.5)], ["x", NumberCell(None)]])
    assert not re.search("<[ius]>", table)
    assert '<td class="n" data-value="0.5">0.5000</td>' in table


def test_a_page_is_one_file(page: Page, runs: Path, tmp_path: Path) -> None:
    """It refers to no other file, and its policy forbids that; its script is small, and ids are unique."""
    addresses = [a.get(key) for _, a in page.tags for key in ("src", "href", "xlink:href") if a.get(key)]
    assert all(str(address).startswith(("#", "data:")) for address in addresses)
    text = write_report([str(runs / "dual")], tmp_path / "one.html").read_text()
    assert "default-src 'none'" in text
    assert len(text.partition("<script>")[2].partition("</script>")[0]) < 2000
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {str(address)[1:] for address in addresses if str(address).startswith("#")}
    assert targets <= set(ids)


@pytest.mark.exhaustive
def test_the_same_runs_give_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    arguments = [str(runs / "dual"), str(runs / "layers")]
    first = write_report(arguments, tmp_path / "a.html").read_bytes()
    assert first == write_report(arguments, tmp_path / "b.html").read_bytes()
    assert first != write_report(arguments[::-1], tmp_path / "c.html").read_bytes(), (
        "control: another baseline gives another report"
    )


def test_a_run_without_results_names_the_commands(tmp_path: Path) -> None:
    untrained_run(tmp_path / "new", write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data"))
    keep_warnings(Workdir(tmp_path / "new"), "encode data", [RunWarning("collapse", "the vectors have collapsed")])
    shown = Page(write_report([str(tmp_path / "new")], tmp_path / "report.html").read_text()).sections
    assert "Collapsed vectors (1)encode data: the vectors have collapsed (new)" in shown["warnings"].replace("\n", "")
    for section, command in {
        "training": "jaxret train",
        "throughput": "jaxret encode",
        "quality": "jaxret search",
        "layers": "jaxret probe",
        "cost": "jaxret search",
        "queries": "jaxret search",
    }.items():
        assert command in shown[section], section
    assert "wins always" in shown["winners"]


def test_missing_texts_are_named(runs: Path, tmp_path: Path) -> None:
    (runs / "data" / "queries.jsonl").rename(runs / "data" / "moved")
    try:
        shown = Page(write_report([str(runs / "dual"), str(runs / "layers")], tmp_path / "a.html").read_text()).sections
    finally:
        (runs / "data" / "moved").rename(runs / "data" / "queries.jsonl")
    assert "Texts are missing: " in shown["queries"]


def test_results_that_cannot_be_compared_are_shown_with_the_reason(runs: Path, tmp_path: Path) -> None:
    shown = Page(write_report([str(runs / "dual")], tmp_path / "a.html").read_text()).sections
    assert "There is one system" in shown["quality"]
    assert "with the lowest nDCG@10" in shown["queries"]
    compared = ReportFiles((str(runs / "dual"), str(runs / "layers")), measures=("P@1",)).sets
    assert "has no 'P@1'" in compared[0].problem


def test_a_result_of_unknown_origin_is_shown_and_not_compared(runs: Path, tmp_path: Path) -> None:
    other = Workdir(runs / "dual").evaluation("another")
    write_json(other, read_json(Workdir(runs / "dual").evaluation("data.test")) | {"provenance": {}})
    try:
        shown = Page(write_report([str(runs / "dual"), str(runs / "layers")], tmp_path / "a.html").read_text()).sections
    finally:
        other.unlink()
    assert "Not compared: " in shown["quality"]
    assert "Without a result on this data set: layers." in shown["quality"]
    assert "another.json does not say where its queries are" in shown["warnings"]
    assert re.search(r"queries of data\.test are in .*data \(train\)", shown["warnings"]), (
        "the other queries are checked"
    )


def test_arguments(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither config\.json .*result"):
        write_report([str(tmp_path)], tmp_path / "report.html")
    with pytest.raises(ValueError, match="is given twice"):
        write_report([str(runs / "dual"), str(runs / "dual")], tmp_path / "report.html")
    with pytest.raises(FileNotFoundError, match=r"result 'x'; .*data\.test"):
        write_report([str(runs / "dual")], tmp_path / "report.html", ReportOptions(data=("x",)))
    with pytest.raises(ValueError, match=r"measure 'foo'; .*nDCG@10"):
        write_report([str(runs / "dual")], tmp_path / "report.html", ReportOptions(measures=("foo",)))
    with pytest.raises(ValueError, match=r"--out=.*there is no folder"):
        write_report([str(runs / "dual")], tmp_path / "no" / "report.html")
    with pytest.raises(ValueError, match=r"--report=.*there is no folder"):
        write_report([str(runs / "dual")], tmp_path / "no" / "report.html", flag="--report")
    assert not (tmp_path / "report.html").exists()
    result = Workdir(runs / "dual").evaluation("data.test")
    assert run_folders([f"a={result},{runs / 'layers'}"]) == [f"a={(runs / 'dual').resolve()},{runs / 'layers'}"]
    with pytest.raises(ValueError, match=r"folder eval/ .*run"):
        run_folders([str(tmp_path / "mine.json")])


def test_the_verb_and_the_flag_of_compare(runs: Path, tmp_path: Path) -> None:
    arguments = (str(runs / "dual"), str(runs / "layers"))
    done = run_script("-m", "jaxret", "report", *arguments, f"--out={tmp_path / 'a.html'}", "--queries=1")
    assert (done.returncode, done.stdout) == (0, f"report: {tmp_path / 'a.html'}\n"), done.stderr
    done = run_script("-m", "jaxret", "compare", *arguments, f"--report={tmp_path / 'b.html'}")
    assert (done.returncode, done.stderr) == (0, f"report: {tmp_path / 'b.html'}\n")
    assert tuple(Page((tmp_path / "b.html").read_text()).sections) == SECTIONS


def test_names_are_not_interpreted_in_pictures() -> None:
    svg = picture_svg(partial(cost_picture, {r"a$\frac$": (1.0, 0.5), "_b": (2.0, 0.6)}, ("bytes", "nDCG@10")))
    assert r"a$\frac$" in svg
    assert "_b" in svg


def test_a_wide_range_of_costs_has_a_logarithmic_axis() -> None:
    """The numbers of the axis are written out, and do not overlap."""
    near = picture_svg(partial(cost_picture, {"a": (100.0, 0.5), "b": (300.0, 0.6)}, ("bytes", "nDCG@10")))
    assert "10^" not in near
    for costs, shown in (((154, 1536), ("200", "500", "1,000")), ((0.1, 1e4), ("0.1", "1,000"))):
        points = {str(cost): (float(cost), 0.5) for cost in costs}
        svg = picture_svg(partial(cost_picture, points, ("bytes", "nDCG@10")))
        assert all(f">{number}</text>" in svg for number in shown)
        assert len(re.findall(">[0-9.,]+</text>", svg)) < 20
