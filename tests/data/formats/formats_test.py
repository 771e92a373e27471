"""From files to records and back: round trips, every kind of bad input with its location, and real data sets."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from jaxret.data import formats
from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    write_beir,
    write_dpr_corpus,
    write_dpr_examples,
    write_dpr_queries,
    write_retrieval_results,
    write_run,
)
from jaxret.data.formats import (
    corpus as corpus_module,
)
from jaxret.data.record_checks import check_question
from jaxret.data.records import Example, Judgement, Passage, Query
from jaxret.evaluation.metrics import evaluate

NASTY = [
    "plain",
    'say "hi" now',
    'a " alone',
    '""',
    "tab\there",
    "line\nbreak",
    "carriage\rreturn",
    "both\r\nof them",
    "  spaces around  ",
    "\ttab first",
    "back\\slash \\n \\",
    "naïve café 東京 🎉",
    "e\u0301 combining",
    "line\u2028separator",
    "nul\x00byte",
    "'single' `` latex ''",
    '{"_id": "1"}',
    "['x']",
]


def passages_of(texts: list[str]) -> list[Passage]:
    return [Passage(f"p{i}", text, title) for i, (text, title) in enumerate(zip(texts, reversed(texts)))]


def lines(path: Path, *rows: str | dict | bytes) -> Path:
    """Write rows: text, objects as JSON, or raw bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    path.write_bytes(b"".join(row + b"\n" for row in encoded))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small valid BEIR folder: 4 passages, 3 queries, 5 judgements."""
    write_beir(
        tmp_path / "beir",
        [Passage(f"p{i}", f"text {i}", "title") for i in range(1, 5)],
        [Query("q1", "first", ("one", "1")), Query("q2", "second"), Query("q3", "third")],
        {
            "train": [
                Judgement("q1", "p1", 1),
                Judgement("q1", "p2", 2),
                Judgement("q1", "p3", 0),
                Judgement("q2", "p4", 1),
                Judgement("q3", "p1", -1),
            ]
        },
    )
    return tmp_path / "beir"


# Round trips


def test_beir_round_trip(tmp_path: Path) -> None:
    passages = [*passages_of(NASTY), Passage("only-title", "", "a title"), Passage("only-text", "a text")]
    queries = [Query(f"q{i}", text, tuple(NASTY[:i])) for i, text in enumerate(NASTY)]
    judgements = [Judgement("q1", "p1", 3), Judgement("q2", "p0", 0), Judgement("q3", "p2", -1)]
    write_beir(tmp_path, passages, queries, {"dev": judgements, "test": judgements[:1]})
    assert list(Corpus.open(tmp_path).read()) == passages
    assert QuerySource.open(tmp_path).read() == queries
    assert JudgementSource.open(tmp_path, "dev").read() == judgements
    assert JudgementSource.open(tmp_path, "test").read() == judgements[:1]
    assert list(Corpus.open(tmp_path).read()) != passages[1:]  # control: equality can fail


def test_rewriting_a_folder_drops_old_answers(folder: Path) -> None:
    assert QuerySource.open(folder).read()[0].answers == ("one", "1")
    write_beir(folder, Corpus.open(folder).read(), [Query("q1", "first")], {})
    assert QuerySource.open(folder).read() == [Query("q1", "first")]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_dpr_corpus_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"psgs.tsv{suffix}"
    passages = passages_of([text for text in NASTY if text == text.strip('"')])
    write_dpr_corpus(path, passages)
    assert list(Corpus.open(path).read()) == passages


def test_dpr_corpus_drops_outer_double_quotes_as_dpr_does(tmp_path: Path) -> None:
    write_dpr_corpus(tmp_path / "psgs.tsv", [Passage("1", '"to be" or "not"', '"Hamlet"')])
    assert list(Corpus.open(tmp_path / "psgs.tsv").read()) == [Passage("1", 'to be" or "not', '"Hamlet"')]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_dpr_queries_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"nq.qa.csv{suffix}"
    queries = [Query(str(i), text, tuple(NASTY[:i])) for i, text in enumerate(NASTY)]
    write_dpr_queries(path, queries)
    assert QuerySource.open(path).read() == queries


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_dpr_examples_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.json{suffix}"
    passages = passages_of(NASTY)
    examples = [
        Example(Query(str(i), text, (text, "x")), (passages[i], passages[i - 1]), tuple(passages[i + 1 : -1]))
        for i, text in enumerate(NASTY[:-1])
    ]
    write_dpr_examples(path, examples)
    assert TrainingSource.open(path).read() == examples
    assert QuerySource.open(path).read() == [example.query for example in examples]
    assert JudgementSource.open(path).read() == [Judgement(e.query.id, p.id, 1) for e in examples for p in e.positives]
    write_dpr_examples(path, [])
    assert TrainingSource.open(path).read() == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_run_round_trip_keeps_every_bit_of_a_score(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.trec{suffix}"
    scores = np.sort(np.random.default_rng(0).normal(size=200).astype(np.float32))[::-1]
    run = {"q1": [(f"p{i}", score) for i, score in enumerate(scores)], "q0": [("p1", -1e-30), ("p2", -2e-30)]}
    write_run(path, run, "tag")
    rankings = RankingSource.open(path).read()
    assert rankings["q1"] == run["q1"]
    assert [passage for passage, _ in rankings["q0"]] == ["p1", "p2"]
    assert list(rankings) == ["q1", "q0"]
    assert np.array_equal(np.array([score for _, score in rankings["q1"]], np.float32), scores)
    first = (gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()).decode().splitlines()[0]
    assert first.split()[:4] == ["q1", "Q0", "p0", "1"]
    assert first.endswith(" tag")


def test_evaluation_tools_see_the_ranking_that_was_written(tmp_path: Path) -> None:
    """trec_eval sorts by float32 score, then by passage id, and ignores ranks."""
    random = np.random.default_rng(0)
    ids = [f"p{i}" for i in range(40)]
    rankings: dict[str, list[tuple[str, float]]] = {}
    judged = []
    for number in range(60):
        passages = random.permutation(ids).tolist()
        exact = np.sort(random.integers(-3, 3, len(ids)))[::-1] * 0.7  # many ties, on both sides of zero
        near = exact - np.arange(len(ids)) * 1e-13  # ties only in float32
        rankings[f"q{number}"] = list(zip(passages, (exact, near, exact * 1e-45, exact * 1e38)[number % 4].tolist()))
        judged += [Judgement(f"q{number}", key, int(random.integers(0, 3))) for key in ids[::3]]
    write_run(tmp_path / "a.trec", rankings, "t")
    read_back = RankingSource.open(tmp_path / "a.trec").read()
    assert {q: [key for key, _ in r] for q, r in read_back.items()} == {
        q: [p for p, _ in r] for q, r in rankings.items()
    }
    for query, ranking in read_back.items():
        scores = np.array([score for _, score in ranking], np.float32)
        assert (scores[1:] < scores[:-1]).all()
        assert scores.tolist() == [score for _, score in ranking]
        np.testing.assert_allclose(scores, [score for _, score in rankings[query]], rtol=1e-5, atol=1e-43)

    qrels: dict[str, dict[str, int]] = {}
    for judgement in judged:
        qrels.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    names = {"nDCG@10": "ndcg_cut_10", "RR": "recip_rank", "R@10": "recall_10", "AP": "map", "Success@1": "success_1"}
    ours = evaluate(rankings, judged, list(names)).per_query

    def differing(run: Mapping[str, Sequence[tuple[str, float]]]) -> int:
        theirs = pytrec_eval.RelevanceEvaluator(qrels, set(names.values())).evaluate(
            {q: dict(r) for q, r in run.items()}
        )
        pairs = [(ours[name][query], theirs[query][names[name]]) for name in names for query in qrels]
        return sum(abs(one - two) > 1e-12 for one, two in pairs)

    assert differing(read_back) == 0
    assert differing(rankings) > 50  # control: the original scores


def test_a_score_beyond_float32_is_refused(tmp_path: Path) -> None:
    for score in (1e39, -1e39):
        with pytest.raises(DataError, match=r"a\.trec:1: .*inf.*finite"):
            write_run(tmp_path / "a.trec", {"q": [("p", score)]}, "t")


def test_compressed_files_carry_no_time_and_no_name(tmp_path: Path) -> None:
    """Then the same text gives the same bytes, and digests of files can be compared."""
    write_dpr_corpus(tmp_path / "psgs.tsv.gz", passages_of(NASTY))
    flags, time = (tmp_path / "psgs.tsv.gz").read_bytes()[3], (tmp_path / "psgs.tsv.gz").read_bytes()[4:8]
    assert (flags, time) == (0, bytes(4))


def test_curly_apostrophes_of_questions_are_straightened_everywhere(tmp_path: Path) -> None:
    query = Query("0", "who’s there", ("who’s",))
    expected = [Query("0", "who's there", ("who’s",))]
    write_beir(tmp_path, [Passage("p", "it’s")], [query], {})
    write_dpr_queries(tmp_path / "a.qa.csv", [query])
    write_dpr_examples(tmp_path / "a.json", [Example(query, (Passage("p", "it’s"),))])
    assert QuerySource.open(tmp_path).read() == QuerySource.open(tmp_path / "a.qa.csv").read() == expected
    assert (
        QuerySource.open(tmp_path / "a.json").read()
        == [e.query for e in TrainingSource.open(tmp_path / "a.json").read()]
        == expected
    )
    assert next(Corpus.open(tmp_path).read()).text == "it’s"


# Variants of the formats


def test_gzip_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    text = '\ufeff{"_id": "a", "text": "x"}\r\n\r\n{"_id": "b", "text": "y", "title": null}\n'
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert list(Corpus.open(tmp_path).read()) == [Passage("a", "x"), Passage("b", "y")]


def test_qrels_with_and_without_header_and_in_trec_form(tmp_path: Path) -> None:
    expected = [Judgement("q1", "p1", 1), Judgement("q2", "p2", 0)]
    lines(tmp_path / "header.tsv", "query-id\tcorpus-id\tscore", "q1\tp1\t1", "q2\tp2\t0")
    lines(tmp_path / "bare.tsv", "q1\tp1\t1", "q2\tp2\t0", "q1\tp1\t1")  # repeating a line is not an error
    lines(tmp_path / "trec.qrels", "q1 0 p1 1", "q2\t0\tp2\t0")
    for name in ("header.tsv", "bare.tsv", "trec.qrels"):
        assert JudgementSource.open(tmp_path / name).read() == expected


def test_psgs_header_is_optional_and_may_order_the_columns(tmp_path: Path) -> None:
    expected = [Passage("1", "text", "title")]
    assert list(Corpus.open(lines(tmp_path / "bare.tsv", "1\ta text\ttitle")).read()) == [
        Passage("1", "a text", "title")
    ]
    for name, rows in {
        "usual.tsv": ["id\ttext\ttitle", "1\ttext\ttitle"],
        "other.tsv": ["id\ttitle\ttext", "1\ttitle\ttext"],
    }.items():
        assert list(Corpus.open(lines(tmp_path / name, *rows)).read()) == expected


def test_long_passages_pass_the_csv_field_limit(tmp_path: Path) -> None:
    long = "word " * 100_000  # 500,000 characters; the csv module's own limit is 131,072
    write_dpr_corpus(tmp_path / "psgs.tsv", [Passage("1", long + '"')])
    assert next(Corpus.open(tmp_path / "psgs.tsv").read()).text == long


def test_biencoder_variants(tmp_path: Path) -> None:
    same = {"title": "t", "text": "x"}
    records = [
        {
            "question": "a",
            "positive_ctxs": [{**same, "psg_id": 7}, {**same, "psg_id": "7"}, {"text": "y", "passage_id": "8"}],
            "negative_ctxs": [{"text": "n", "passage_id": "9"}],
            "hard_negative_ctxs": [],
        },
        {
            "question": "b",
            "positive_ctxs": [same],
            "negative_ctxs": [{"text": "n", "passage_id": "9"}],
            "hard_negative_ctxs": [{"text": "h", "passage_id": "10"}, {**same}, {"text": "h", "passage_id": "10"}],
        },
        {"question": "c", "answers": ["d"], "positive_ctxs": [same]},
    ]
    path = tmp_path / "train.json"
    path.write_text(json.dumps(records))
    first, second, third = TrainingSource.open(path).read()
    assert first.positives == (Passage("7", "x", "t"), Passage("8", "y"))
    assert first.negatives == (Passage("9", "n"),)
    assert second.negatives == (Passage("10", "h"),)  # once, and not its own positive
    assert third == Example(Query("2", "c", ("d",)), second.positives)
    assert third.positives[0] is second.positives[0]
    assert len(second.positives[0].id) == 24
    assert second.positives[0].id != "7"


# Examples


def test_beir_examples_one_for_each_relevant_judgement(folder: Path) -> None:
    p = {passage.id: passage for passage in Corpus.open(folder).read()}
    q1, q2, _ = QuerySource.open(folder).read()
    examples = TrainingSource.open(folder, "train").read()
    assert examples == [
        Example(q1, (p["p1"], p["p2"]), (p["p3"],)),
        Example(q1, (p["p2"], p["p1"]), (p["p3"],)),
        Example(q2, (p["p4"],)),
    ]
    assert examples[0].positives[0] is examples[1].positives[1]
    assert examples[0].negatives[0] is examples[1].negatives[0]


def test_beir_examples_with_negatives_of_a_run(folder: Path) -> None:
    ranking = [("p4", 4.0), ("p2", 3.0), ("p1", 2.0), ("p3", 1.0)]
    write_run(folder / "run.trec", {"q1": ranking, "q3": ranking}, "bm25")
    examples = TrainingSource.open(folder, "train", folder / "run.trec").read()
    assert [[passage.id for passage in example.negatives] for example in examples] == [["p4", "p3"], ["p4", "p3"], []]
    write_run(folder / "run.trec", {"q2": ranking}, "bm25")  # q1 has no results, so it has no negatives
    examples = TrainingSource.open(folder, "train", folder / "run.trec").read()
    assert [[passage.id for passage in example.negatives] for example in examples] == [[], [], ["p2", "p1", "p3"]]
    write_run(folder / "run.trec", {"q1": [("p9", 1.0)]}, "bm25")
    with pytest.raises(DataError, match=r"run\.trec:1: .*passage .*'p9'"):
        TrainingSource.open(folder, "train", folder / "run.trec").read()
    with pytest.raises(DataError, match="has its own negatives"):
        TrainingSource.open(lines(folder / "a.json", "[]"), negatives_run=folder / "run.trec").read()


# Bad input

GOOD = {"_id": "ok", "text": "good"}

BAD_CORPUS_LINES: list[tuple[str | bytes | dict, str, str]] = [
    (b'{"_id": "a", "text": "\xff"}', "not UTF-8", r":2: byte 0xff at position 23 .* is not UTF-8; convert"),
    ('{"_id": "a", "text": ', "broken JSON", r":2: this is not JSON \(.*\); write"),
    ("[" * 200_000, "broken JSON", r":2: this is not JSON"),
    ('["a"]', "wrong type", r":2: this is a list; a JSON object"),
    ({"id": "a", "text": "x"}, "missing key", r":2: there is no key '_id' \(keys found: 'id', 'text'\); add '_id'"),
    ({"_id": 7, "text": "x"}, "wrong type", r":2: the value of '_id' is an integer: 7; a string is expected"),
    ({"_id": "a", "text": None}, "wrong type", r":2: the value of 'text' is null"),
    ({"_id": "a", "text": "x", "title": ["t"]}, "wrong type", r":2: the value of 'title' is a list"),
    ({"_id": "a", "text": " \n", "title": ""}, "empty passage", r":2: passage 'a' is empty \(no text, no title\)"),
    ({"_id": "a b", "text": "x"}, "bad id", r":2: passage id 'a b' contains white space"),
    ({"_id": "a\u00a0b", "text": "x"}, "bad id", r":2: passage id .* contains white space"),
    ({"_id": "", "text": "x"}, "bad id", r":2: passage id is empty"),
    ({"_id": "a\0b", "text": "x"}, "bad id", r":2: passage id 'a\\x00b' contains a control character"),
    ({"_id": "a\x7f", "text": "x"}, "bad id", r":2: passage id .* contains a control character"),
    ({"_id": "a\u0085b", "text": "x"}, "bad id", r":2: passage id .* contains white space"),
    ({"_id": "a\u0080b", "text": "x"}, "bad id", r":2: passage id .* contains a control character"),
    (
        '{"_id": "a", "text": "x", "text": "y"}',
        "repeated key",
        r":2: the key 'text' occurs twice in this object; keep",
    ),
    ({"_id": "a", "text": "\ud800"}, "not UTF-8", r":2: the text holds half of a surrogate pair at character 1"),
    (GOOD, "duplicate id", r":2: passage id 'ok' was used before, on line 1"),
]


def check(read: Callable[[Policy], object], reason: str, message: str, location: str) -> object:
    """Check that `read` raises `message` under the default policy, and counts `reason` at `location` under "skip"."""
    with pytest.raises(DataError, match=message):
        read(Policy())
    policy = Policy("skip")
    result = read(policy)
    assert policy.skip_counts == {reason: 1}
    assert policy.report() == f"skipped 1 record: 1 {reason} ({location})"
    return result


@pytest.mark.parametrize(("line", "reason", "message"), BAD_CORPUS_LINES)
def test_bad_corpus_lines(tmp_path: Path, line: str | bytes | dict, reason: str, message: str) -> None:
    path = lines(tmp_path / "corpus.jsonl", GOOD, line, {"_id": "last", "text": "", "title": "legal"})
    expected = [Passage("ok", "good"), Passage("last", "", "legal")]
    assert check(lambda policy: list(Corpus.open(path).read(policy)), reason, message, "corpus.jsonl:2") == expected
    scan = check(lambda policy: Corpus.open(path).scan(policy), reason, message, "corpus.jsonl:2")
    assert isinstance(scan, formats.CorpusScan)
    assert scan.passages == 2
    policy = Policy("skip")
    assert list(Corpus.open(path).read(policy, scan)) == expected
    assert policy.skip_counts == {reason: 1}


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (b"2\t\xff\ttitle", "not UTF-8", r":2: byte 0xff"),
        ("2\ttext", "wrong columns", r":2: this row has 2 columns, beginning '2'; 3 are expected"),
        ('2\t"so" he said\ttitle', "broken quoting", r":2: the row that begins here is not well-formed CSV"),
        ("2\t \t", "empty passage", r":2: passage '2' is empty"),
        ('2\t""\t', "empty passage", r":2: passage '2' is empty"),
        ("1\tagain\tt", "duplicate id", r":2: passage id '1' was used before, on line 1"),
    ],
)
def test_bad_psgs_rows(tmp_path: Path, row: str | bytes, reason: str, message: str) -> None:
    path = lines(tmp_path / "psgs.tsv", "1\ttext\ttitle", row, '3\t"two\nlines"\ttitle')
    expected = [Passage("1", "text", "title"), Passage("3", "two\nlines", "title")]
    assert check(lambda policy: list(Corpus.open(path).read(policy)), reason, message, "psgs.tsv:2") == expected
    scan = check(lambda policy: Corpus.open(path).scan(policy), reason, message, "psgs.tsv:2")
    assert isinstance(scan, formats.CorpusScan)
    assert scan.passages == 2


def test_rows_of_several_lines_are_placed_at_their_first(tmp_path: Path) -> None:
    rows: list[str | bytes] = ["id\ttext\ttitle", '1\t"two\nlines"\tt', b'2\t"broken\n\xff"\tt', "1\tx\tt"]
    path = lines(tmp_path / "psgs.tsv", *rows)
    policy = Policy("skip")
    assert [passage.id for passage in Corpus.open(path).read(policy)] == ["1"]
    assert policy.report() == "skipped 2 records: 1 not UTF-8 (psgs.tsv:5), 1 duplicate id (psgs.tsv:6)"
    with pytest.raises(DataError, match=r":1: .*header .*columns"):
        list(Corpus.open(lines(path, "id\tbody\ttitle")).read(Policy("skip")))


def test_an_unclosed_quote_does_not_swallow_the_rest_silently(tmp_path: Path) -> None:
    path = lines(tmp_path / "psgs.tsv", "1\ta b\tt", '2\t"open\tt', "3\tb c\tt", "4\tc d\tt")
    with pytest.raises(DataError, match=r":2: .*begins .*well-formed CSV"):
        list(Corpus.open(path).read())


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        ({"_id": "b", "text": "  "}, "empty query", r":2: query 'b' has no text"),
        ({"_id": "ok", "text": "x"}, "duplicate id", r":2: query id 'ok' was used before, on line 1"),
        ({"_id": "b"}, "missing key", r":2: there is no key 'text'"),
        ({"_id": "b c", "text": "x"}, "bad id", r":2: query id 'b c' contains white space"),
    ],
)
def test_bad_query_lines(tmp_path: Path, line: dict, reason: str, message: str) -> None:
    path = lines(tmp_path / "queries.jsonl", GOOD, line)
    queries = check(lambda policy: QuerySource.open(path).read(policy), reason, message, "queries.jsonl:2")
    assert queries == [Query("ok", "good")]


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        ({"_id": "q9", "answers": ["x"]}, "unknown query id", r":2: these answers are for query 'q9'"),
        ({"_id": "q1", "answers": ["x"]}, "duplicate id", r":2: query id 'q1' was used before, on line 1"),
        ({"_id": "q2", "answers": "x"}, "wrong type", r":2: the value of 'answers' is a string: 'x'; a list"),
        ({"_id": "q2", "answers": [1]}, "wrong type", r":2: the value of 'answers' is a list: \[1\]; a list of str"),
    ],
)
def test_bad_answer_lines(folder: Path, line: dict, reason: str, message: str) -> None:
    lines(folder / "answers.jsonl", {"_id": "q1", "answers": ["one"]}, line)
    queries = check(lambda policy: QuerySource.open(folder).read(policy), reason, message, "answers.jsonl:2")
    assert isinstance(queries, list)
    assert [query.answers for query in queries] == [("one",), (), ()]


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ("who", "wrong columns", r":2: this row has 1 columns"),
        ("who\t[x]", "broken answers", r":2: the answer column is not a Python list: '\[x\]'"),
        ("who\t__import__('os').getcwd()", "broken answers", r":2: the answer column is not a Python list"),
        ("who\t'x'", "wrong type", r":2: the answer column is a string"),
        (" \t['x']", "empty query", r":2: query '1' has no text"),
        (b"who\t['\xff']", "not UTF-8", r":2: byte 0xff"),
        ("\"who\" is\t['x']", "broken quoting", r":2: the row that begins here is not well-formed CSV"),
    ],
)
def test_bad_qa_rows(tmp_path: Path, row: str | bytes, reason: str, message: str) -> None:
    path = lines(tmp_path / "a.qa.csv", "first\t['x']", row, "third\t['\\d+']")
    queries = check(lambda policy: QuerySource.open(path).read(policy), reason, message, "a.qa.csv:2")
    assert queries == [Query("0", "first", ("x",)), Query("2", "third", ("\\d+",))]  # ids are still row numbers


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ("q1\tp1", "wrong columns", r":2: this line has 2 columns between tabs and 2 words"),
        ("q1\tp1\t0.5", "bad score", r":2: score '0.5' is not an integer"),
        ("q1\tp 1\t1", "bad id", r":2: passage id 'p 1' contains white space"),
        ("\tp1\t1", "bad id", r":2: query id is empty"),
        ("q2\tp2\t0", "contradicting judgement", r":2: score 0 for .* contradicts score 1 on line 1"),
    ],
)
def test_bad_judgement_lines(folder: Path, row: str, reason: str, message: str) -> None:
    lines(folder / "qrels/test.tsv", "q2\tp2\t1", row)
    judgements = check(lambda policy: JudgementSource.open(folder, "test").read(policy), reason, message, "test.tsv:2")
    assert judgements == [Judgement("q2", "p2", 1)]
    examples = check(lambda policy: TrainingSource.open(folder, "test").read(policy), reason, message, "test.tsv:2")
    assert isinstance(examples, list)
    assert [example.query.id for example in examples] == ["q2"]


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ("q9\tp1\t1", "unknown query id", r":2: there is no query with the id 'q9'"),
        ("q1\tp9\t1", "unknown passage id", r":2: there is no passage with the id 'p9'"),
    ],
)
def test_judgements_of_unknown_ids(folder: Path, row: str, reason: str, message: str) -> None:
    lines(folder / "qrels/test.tsv", "q2\tp2\t1", row)
    examples = check(lambda policy: TrainingSource.open(folder, "test").read(policy), reason, message, "test.tsv:2")
    assert isinstance(examples, list)
    assert [example.query.id for example in examples] == ["q2"]


POSITIVE = {"passage_id": "1", "title": "t", "text": "x"}


@pytest.mark.parametrize(
    ("record", "reason", "message", "place"),
    [
        ("text", "wrong type", r":record 1: this is a string", ""),
        ({"positive_ctxs": [POSITIVE]}, "missing key", r":record 1: there is no key 'question'", ""),
        ({"question": "a"}, "missing key", r":record 1: there is no key 'positive_ctxs'", ""),
        ({"question": "a", "positive_ctxs": []}, "no positive", r":record 1: 'positive_ctxs' holds no passage", ""),
        (
            {"question": "a", "positive_ctxs": {}},
            "wrong type",
            r":record 1: the value of 'positive_ctxs' is an obj",
            "",
        ),
        ({"question": "", "positive_ctxs": [POSITIVE]}, "empty query", r":record 1: query '1' has no text", ""),
    ],
)
def test_bad_records(tmp_path: Path, record: object, reason: str, message: str, place: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([{"question": "q", "positive_ctxs": [POSITIVE]}, record]))
    examples = check(
        lambda policy: TrainingSource.open(path, None).read(policy), reason, message, "train.json:record 1"
    )
    assert examples == [Example(Query("0", "q"), (Passage("1", "x", "t"),))]


@pytest.mark.parametrize(
    ("context", "reason", "message"),
    [
        ({"passage_id": "2", "text": ""}, "empty passage", "passage '2' is empty"),
        ({"passage_id": "2"}, "missing key", "there is no key 'text'"),
        ({"passage_id": "2", "text": "REPEATED"}, "repeated key", "the key 'text' occurs twice in this object"),
        ({"passage_id": 1.5, "text": "y"}, "wrong type", "the value of 'passage_id' is a number: 1.5"),
        ({"passage_id": "1", "text": "y"}, "duplicate id", r"'1' has another title or text than at record 0, positive"),
    ],
)
def test_bad_contexts_leave_the_record(tmp_path: Path, context: dict, reason: str, message: str) -> None:
    path = tmp_path / "train.json"
    record = {"question": "q", "positive_ctxs": [POSITIVE], "hard_negative_ctxs": [context]}
    path.write_text(json.dumps([record]).replace('"REPEATED"', '"x", "text": "y"'))
    place = "record 0, hard_negative_ctxs[0]"
    examples = check(
        lambda policy: TrainingSource.open(path, None).read(policy), reason, message, f"train.json:{place}"
    )
    assert examples == [Example(Query("0", "q"), (Passage("1", "x", "t"),))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'[\n{"question": \n', r"train\.json:3: this is not JSON"),
        (b'[\n"\xff"]', r"train\.json:2: byte 0xff"),
        (b'{"question": "a"}', r"train\.json: .*records .*'question'; .*DPR"),
    ],
)
def test_a_broken_biencoder_file_is_an_error_under_any_policy(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "train.json").write_bytes(text)
    with pytest.raises(DataError, match=message):
        TrainingSource.open(tmp_path / "train.json", None).read(Policy("skip"))


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ("q Q0 p2 2 1.0", "wrong columns", r":2: this line has 5 columns"),
        ("q Q0 p2 two 1.0 t", "bad rank", r":2: rank 'two' is not an integer"),
        ("q Q0 p2 2 nan t", "bad score", r":2: score 'nan' is not a finite number"),
        ("q Q0 p2 2 x t", "bad score", r":2: score 'x' is not a finite number"),
        ("q Q0 p1 2 1.0 t", "duplicate passage", r":2: passage 'p1' is retrieved twice .*the first is on line 1"),
        ("q Q0 p2 2 3.5 t", "rank against score", r":2: rank 2 has score 3.5, above 2.0 at rank 1"),
        ("q Q0 p\0 2 1.0 t", "bad id", r":2: passage id 'p\\x00' contains a control character"),
        ("q\x7f Q0 p2 2 1.0 t", "bad id", r":2: query id .* contains a control character"),
    ],
)
def test_bad_run_lines(tmp_path: Path, row: str, reason: str, message: str) -> None:
    path = lines(tmp_path / "a.trec", "q Q0 p1 1 2.0 t", row, "q Q0 p3 3 0.5 t")
    rankings = check(lambda policy: RankingSource.open(path).read(policy), reason, message, "a.trec:2")
    assert rankings == {"q": [("p1", 2.0), ("p3", 0.5)]}


@pytest.mark.parametrize(("prefix", "score"), [("tevatron.run:", "1.5"), ("msmarco.run:", "2")])
def test_ids_of_tab_separated_rankings_are_words(tmp_path: Path, prefix: str, score: str) -> None:
    """These are Tevatron's rankings, and MS MARCO's."""
    path = lines(tmp_path / "a.tsv", f"q\tp1\t{score.replace('2', '1')}", f"q\tp\0\t{score}")
    message = r":2: passage id 'p\\x00' contains a control character"
    rankings = check(lambda policy: RankingSource.open(f"{prefix}{path}").read(policy), "bad id", message, "a.tsv:2")
    assert isinstance(rankings, dict)
    assert [passage for passage, _ in rankings["q"]] == ["p1"]


def test_a_run_is_ordered_by_rank_not_by_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.trec", "q Q0 p2 2 1.0 t", "r Q0 p1 0 1 t", "q Q0 p1 1 2.0 t")
    assert RankingSource.open(path).read() == {"q": [("p1", 2.0), ("p2", 1.0)], "r": [("p1", 1.0)]}


def test_results_of_no_query_are_an_empty_array(tmp_path: Path) -> None:
    write_retrieval_results(tmp_path / "a.json", [])
    assert json.loads((tmp_path / "a.json").read_text()) == []


def test_writers_refuse_what_readers_refuse(tmp_path: Path) -> None:
    bad_passage, bad_query = Passage("a b", "x"), Query("q", " ")
    attempts: list[Callable[[], object]] = [
        lambda: write_beir(tmp_path, [bad_passage], [], {}),
        lambda: write_beir(tmp_path, [], [bad_query], {}),
        lambda: write_beir(tmp_path, [], [], {"test": [Judgement("q q", "p", 1)]}),
        lambda: write_dpr_corpus(tmp_path / "a.tsv", [bad_passage]),
        lambda: write_dpr_queries(tmp_path / "a.qa.csv", [bad_query]),
        lambda: write_dpr_queries(tmp_path / "a.qa.csv", [Query("q", "x", ("\ud800",))]),
        lambda: write_dpr_examples(tmp_path / "a.json", [Example(Query("0", "x"), (bad_passage,))]),
        lambda: write_run(tmp_path / "a.trec", {"q": [("p", 1.0), ("r", 2.0)]}, "t"),
        lambda: write_run(tmp_path / "a.trec", {"q": [("p", float("nan"))]}, "t"),
        lambda: write_run(tmp_path / "a.trec", {"q": [("p", 1.0), ("p", 1.0)]}, "t"),
        lambda: write_run(tmp_path / "a.trec", {"q": [("p", 1.0)]}, "two words"),
    ]
    for attempt in attempts:
        with pytest.raises(DataError):
            attempt()
    assert not list(tmp_path.glob("a.*"))  # the failed writers leave no part of a file


def test_errors_of_missing_files_list_existing_ones(folder: Path) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: Corpus.open(folder / "nowhere").read(),
            r"nowhere: this file does not exist; .*beir holds answers\.jsonl, c",
        ),
        (
            lambda: Corpus.open(folder / "qrels").read(),
            r"corpus\.jsonl: neither this file nor its \.gz or .*qrels holds train\.tsv",
        ),
        (lambda: JudgementSource.open(folder, "tset").read(), r"tset\.tsv.*qrels holds train\.tsv"),
        (lambda: JudgementSource.open(folder).read(), r"no split was named"),
        (
            lambda: RankingSource.open(folder / "a" / "b.trec").read(),
            r"b\.trec: this file does not exist; .*beir holds answers",
        ),
        (
            lambda: Corpus.open(lines(folder / "c.parquet", "neither", "one")).read(),
            r"c\.parquet:1: this is not a known format: nothing in it can be read; no format is near",
        ),
        (
            lambda: Corpus.open(lines(folder / "only", '{"_id": "a", "text": "x"')).read(),
            r"only:1: this is not JSON \(.*\); write one whole JSON value",
        ),
        (
            lambda: DataSource.open(lines(folder / "bare.jsonl", "", "", '{"_id": "a"')).file(),
            r"bare\.jsonl:3: this is not JSON",
        ),
        (lambda: Corpus.open(lines(folder / "list", '[{"_id": "a"')).read(), r"list:1: this is not JSON"),
    ]
    for attempt, message in cases:
        with pytest.raises(DataError, match=message.replace(r"corpus\.jsonl \(", r"corpus\.jsonl: this file \(")):
            attempt()


def test_a_truncated_gzip_file_is_an_error_under_any_policy(tmp_path: Path) -> None:
    write_dpr_corpus(tmp_path / "psgs.tsv.gz", [Passage(str(i), f"text {i * i}") for i in range(1000)])
    whole = (tmp_path / "psgs.tsv.gz").read_bytes()
    (tmp_path / "psgs.tsv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"psgs\.tsv\.gz:\d+: the compressed file is damaged"):
        list(Corpus.open(tmp_path / "psgs.tsv.gz").read(Policy("skip")))
    (tmp_path / "corpus.jsonl.gz").write_bytes(b"not compressed")
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz:1: the compressed file is damaged"):
        Corpus.open(tmp_path).scan(Policy("skip"))


# The policy and the scan


def test_policy_counts_each_record_once_and_reports_in_one_line() -> None:
    policy = Policy("skip", examples_per_reason=2)
    assert policy.report() == ""
    for line in (1, 2, 3, 3, 3):
        policy.reject(Location(Path("a/c.jsonl"), line).error("empty passage", "it is empty", "fill it"))
    policy.reject(Location(Path("a/c.jsonl"), 3).error("own reason", "found", "remedy"))
    assert policy.skip_counts == {"empty passage": 3, "own reason": 1}
    assert policy.report() == "skipped 4 records: 3 empty passage (c.jsonl:1, c.jsonl:2, ...), 1 own reason (c.jsonl:3)"
    with pytest.raises(ValueError, match=r"on_error .*'ignore'; .*error, skip, keep"):
        Policy("ignore")


def test_data_error_survives_pickling() -> None:
    error = Location(Path("a"), 3).error("reason", "found", "remedy")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason) == ("a:3: found; remedy", "reason")


def test_scan_agrees_with_reading_and_names_all_lines(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "c", "b", "a"]
    path = lines(tmp_path / "corpus.jsonl", *({"_id": key, "text": str(i)} for i, key in enumerate(ids)))
    policy = Policy("skip")
    scan = Corpus.open(tmp_path).scan(policy)
    assert scan.duplicates == {"a": (1, 3, 6), "b": (2, 5)}
    assert policy.skip_counts == {"duplicate id": 3}
    with_scan = list(Corpus.open(path).read(policy, scan))
    assert (
        with_scan == list(Corpus.open(path).read(policy)) == [Passage("a", "0"), Passage("b", "1"), Passage("c", "3")]
    )
    assert scan.passages == len(with_scan)
    assert policy.skip_counts == {"duplicate id": 3}  # records that are read twice are counted once


def test_scan_tells_equal_hashes_from_equal_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "corpus.jsonl", *({"_id": key, "text": "x"} for key in ("aa", "ab", "b", "aa")))
    monkeypatch.setattr(corpus_module, "hash_id", lambda passage_id: ord(passage_id[0]))
    scan = Corpus.open(path).scan(Policy("skip"))
    assert scan.duplicates == {"aa": (1, 4)}
    assert scan.passages == 3


def test_scan_digest_is_of_the_decompressed_bytes(tmp_path: Path) -> None:
    plain = lines(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    other = lines(tmp_path / "c.jsonl", {**GOOD, "text": "changed"})
    assert Corpus.open(plain).scan() == Corpus.open(tmp_path / "b.jsonl.gz").scan()
    assert Corpus.open(plain).scan().sha256 != Corpus.open(other).scan().sha256
    assert Corpus.open(lines(tmp_path / "empty.jsonl")).scan().passages == 0


def test_streaming_with_a_scan_believes_it(tmp_path: Path) -> None:
    path = lines(tmp_path / "corpus.jsonl", GOOD, GOOD, "broken")
    stream = Corpus.open(path).read(scan=formats.CorpusScan(3, ""))
    assert next(stream) == Passage("ok", "good")
    assert next(stream) == Passage("ok", "good")  # it stores no ids, because the scan says that there are no duplicates
    with pytest.raises(DataError):
        next(stream)


def test_on_error_keep_accepts_only_empty_passages(tmp_path: Path) -> None:
    rows: list[dict] = [
        GOOD,
        {"_id": "a", "text": " "},
        {"_id": "b", "text": "", "title": "\n"},
        {"_id": "c", "text": ""},
    ]
    path = lines(tmp_path / "corpus.jsonl", *rows)
    expected = [Passage("ok", "good"), Passage("a", " "), Passage("b", "", "\n"), Passage("c", "")]
    policy = Policy("keep", examples_per_reason=2)
    scan = Corpus.open(path).scan(policy)
    assert scan.passages == len(rows)
    assert list(Corpus.open(path).read(policy, scan)) == list(Corpus.open(path).read(policy)) == expected
    assert policy.report() == "kept 3 empty passages (corpus.jsonl:2, corpus.jsonl:3, ...)"
    assert list(Corpus.open(lines(tmp_path / "a.tsv", "1\tx y\tt", "2\t \t")).read(Policy("keep")))[1] == Passage(
        "2", " "
    )
    record = {"question": "q", "positive_ctxs": [{"text": "", "passage_id": "1"}]}
    (tmp_path / "a.json").write_text(json.dumps([record]))
    assert TrainingSource.open(tmp_path / "a.json", None).read(Policy("keep"))[0].positives == (Passage("1", ""),)
    for bad, message in [
        ({"_id": "ok", "text": ""}, "used before, on line 1"),  # the id of an empty passage counts as used
        ({"_id": "c", "text": ""}, "used before, on line 4"),
        ({"_id": "d"}, "no key 'text'"),
    ]:
        lines(path, *rows, bad)
        for read in (
            lambda: Corpus.open(path).scan(Policy("keep")),
            lambda: list(Corpus.open(path).read(Policy("keep"))),
        ):
            with pytest.raises(DataError, match=rf":5: .*{message}"):
                read()
    with pytest.raises(DataError, match="query 'a' has no text"):
        QuerySource.open(lines(tmp_path / "queries.jsonl", GOOD, {"_id": "a", "text": " "})).read(Policy("keep"))


def test_the_search_for_duplicates_stops_at_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["a", "b", "a", *(f"{i}" for i in range(500)), *(f"{i}" for i in range(500))]
    path = lines(tmp_path / "corpus.jsonl", *({"_id": key, "text": "x"} for key in ids))
    read: list[str] = []
    hash_of = corpus_module.hash_id

    def noting(key: str) -> int:
        read.append(key)
        return hash_of(key)

    monkeypatch.setattr(corpus_module, "hash_id", noting)
    with pytest.raises(DataError, match=r":3: passage .*'a' .*1"):
        Corpus.open(path).scan()
    assert read[len(ids) :] == ["a", "b", "a"]
    read.clear()
    # Control: with "skip", the scan needs all repeated ids.
    assert len(Corpus.open(path).scan(Policy("skip")).duplicates) == 501
    assert len(read) == 2 * len(ids)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows[:1], {"_id": "p1", "text": "Text 1"}, *rows[2:]],
        lambda rows: [*rows, {"_id": "new", "text": "x"}],
        lambda rows: rows[:-1],
        lambda rows: [],
    ],
)
def test_a_corpus_changed_after_its_scan_is_an_error(
    tmp_path: Path, suffix: str, change: Callable[[list], list]
) -> None:
    rows = [{"_id": f"p{i}", "text": f"text {i}"} for i in range(5)]

    def write(rows: list[dict]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if suffix else text)

    path = tmp_path / f"corpus.jsonl{suffix}"
    write(rows)
    scan, before = Corpus.open(tmp_path).scan(), path.stat()
    assert len(list(islice(Corpus.open(tmp_path).read(scan=scan), scan.passages))) == 5
    write(change(rows))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = Corpus.open(path).scan().sha256
    message = rf"corpus\.jsonl{suffix}: the corpus changed: its SHA-256 was {scan.sha256} .* is {now} now; .*again"
    # The error is raised even if a reader takes only as many passages as were counted.
    with pytest.raises(DataError, match=message):
        list(islice(Corpus.open(tmp_path).read(scan=scan), scan.passages))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the question is blank; write"),
        (" \t\u00a0", "the question is blank; write"),
        ("a\udcff", r"0xff, .*UTF-8, .*character 2; .*UTF-8"),  # $'a\xff' in a shell
        ("\ud83d", r"surrogate .*character 1"),
    ],
)
def test_an_empty_question_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_question(text)


def test_a_typed_question_equals_one_from_a_file(tmp_path: Path) -> None:
    lines(tmp_path / "queries.jsonl", {"_id": "0", "text": "who’s there 🎉"})
    assert [check_question("who’s there 🎉")] == QuerySource.open(tmp_path / "queries.jsonl").read()


# Real data


def test_real_scifact(data_dir: Path) -> None:
    folder = data_dir / "scifact"
    scan = Corpus.open(folder).scan()
    assert (scan.passages, scan.duplicates) == (5183, {})
    passage_ids = {passage.id for passage in Corpus.open(folder).read(scan=scan)}
    query_ids = {query.id for query in QuerySource.open(folder).read()}
    assert (len(passage_ids), len(query_ids)) == (5183, 1109)
    for split, queries, judgements in [("train", 809, 919), ("test", 300, 339)]:
        split_judgements = JudgementSource.open(folder, split).read()
        judged_ids = {judgement.query_id for judgement in split_judgements}
        assert (len(judged_ids), len(split_judgements)) == (queries, judgements)
        assert judged_ids <= query_ids
        assert {judgement.passage_id for judgement in split_judgements} <= passage_ids
    assert len(TrainingSource.open(folder, "train").read()) == 919


@pytest.mark.slow
def test_real_squadshifts_has_answers(data_dir: Path) -> None:
    folder = data_dir / "squadshifts-amazon"
    examples = TrainingSource.open(folder, "dev").read()
    assert len(examples) == 1226
    assert all(example.query.answers for example in examples)


def test_real_cranfield_has_an_empty_passage(data_dir: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl:471: passage '471' is empty"):
        Corpus.open(data_dir / "cranfield").scan()
    policy = Policy("skip")
    assert Corpus.open(data_dir / "cranfield").scan(policy).passages == 1398
    assert policy.report() == "skipped 2 records: 2 empty passage (corpus.jsonl:471, corpus.jsonl:995)"


@pytest.mark.slow
def test_real_nq_qed(data_dir: Path) -> None:
    folder = data_dir / "nq-qed"
    corpus = {passage.id: passage for passage in Corpus.open(folder / "psgs.tsv").read()}
    # The file has 8,810 lines below its header, but 66 passages contain 519 line ends.
    assert list(corpus) == [str(i) for i in range(1, 8292)]
    examples = TrainingSource.open(folder / "train.json").read()
    assert len(examples) == 5789
    assert all(example.positives[0].title == corpus[example.positives[0].id].title for example in examples)
    assert QuerySource.open(folder / "test.json").read() == QuerySource.open(folder / "test.qa.csv").read()


def test_real_dpr_sample(data_dir: Path) -> None:
    path = data_dir / "dpr-sample" / "biencoder-sample.json"
    examples = TrainingSource.open(path).read()
    assert len(examples) == 5
    assert all(example.negatives and example.query.answers for example in examples)
    for example, record in zip(examples, json.loads(path.read_text(encoding="utf-8")), strict=True):
        ids = {key: [c["passage_id"] for c in record[key]] for key in ("positive_ctxs", "hard_negative_ctxs")}
        assert [passage.id for passage in example.positives] == list(dict.fromkeys(ids["positive_ctxs"]))
        assert {p.id for p in example.negatives} == set(ids["hard_negative_ctxs"]) - set(ids["positive_ctxs"])


@pytest.mark.parametrize("key", ['"', '"a', 'a"b"'])
def test_an_id_with_quotes_is_read_back_from_dpr_s_passages(key: str, tmp_path: Path) -> None:
    passages = [Passage(key, "text", "title"), Passage("next", "text")]
    write_dpr_corpus(tmp_path / "psgs.tsv", passages)
    assert list(Corpus.open(tmp_path / "psgs.tsv").read()) == passages
