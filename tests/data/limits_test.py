"""Memory and time do not grow with a line or a text, however small the compressed file is."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxret.data import lines
from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import Corpus, JudgementSource, QuerySource, RankingSource, TrainingSource, tables
from jaxret.data.lines import read_json_array
from jaxret.data.records import Passage
from tests.conftest import REPOSITORY
from tests.pipeline import write_encoder

MIB = 2**20
AIR = 200  # MiB for buffers and the allocator; machines differ by half of it
LIMIT = 16  # MiB per line
LONG = pytest.mark.exhaustive


def write_gzip(path: Path, *parts: bytes | tuple[bytes, int]) -> Path:
    """Members of a gzip file; (bytes, n) is compressed once and written n times."""
    with path.open("wb") as file:
        for part, times in (part if isinstance(part, tuple) else (part, 1) for part in parts):
            member = gzip.compress(part, 1)
            for _ in range(times):
                file.write(member)
    return path


def measure(code: str, path: Path) -> tuple[str, float, float]:
    """Run code on `path` in a new process: (its output or error; CPU seconds; the peak of memory in MiB above that of
    the imports)."""
    program = f"""
import re, sys, time
from jaxret.data.formats import *
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation

def peak():  # not ru_maxrss, which begins with the memory of the process that started this one
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024

path, begin, before = sys.argv[1], time.process_time(), peak()
try:
    {code}
except DataError as error:
    print(error)
print(time.process_time() - begin, peak() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    *said, numbers = result.stdout.splitlines()
    seconds, peak = map(float, numbers.split())
    return "\n".join(said), seconds, peak


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "code", "start", "filler"),
    [
        ("corpus.jsonl.gz", "Corpus.open(path).scan()", b'{"_id": "1", "text": "', b"river "),
        pytest.param("corpus.jsonl.gz", "Corpus.open(path).scan()", b"", b"\0", marks=LONG),
        pytest.param("psgs.tsv.gz", "Corpus.open(path).scan()", b"1\t", b"x", marks=LONG),
        ("psgs.tsv.gz", "Corpus.open(path).scan()", b'id\ttext\ttitle\n1\t"', b"a quote that is never closed\n"),
        pytest.param("test.tsv.gz", "JudgementSource.open(path).read()", b"q1\tp1\t", b"0", marks=LONG),
        ("train.json.gz", "TrainingSource.open(path).read()", b'[{"question": "', b"river "),
        pytest.param("train.json.gz", "TrainingSource.open(path).read()", b"[", b"[", marks=LONG),
    ],
)
def test_an_endless_line_is_an_error(tmp_path: Path, name: str, code: str, start: bytes, filler: bytes) -> None:
    path = write_gzip(tmp_path / name, start, (filler * (8 * MIB // len(filler)), 200))  # 1.6 GB
    said, seconds, peak = measure(code, path)
    assert f"{name}:{start.count(10) + 1}: this " in said
    assert f"has more than {LIMIT} MiB; split it" in said
    assert peak < AIR + 350
    assert seconds < 20


@pytest.mark.daily("corpus.jsonl.gz")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["corpus.jsonl.gz", pytest.param("psgs.tsv.gz", marks=LONG)])
def test_a_billion_blank_lines_cost_little(tmp_path: Path, name: str) -> None:
    path = write_gzip(tmp_path / name, (b"\n" * (8 * MIB), 8), b"not a record")
    said, seconds, peak = measure("Corpus.open(path).scan()", path)
    assert f"{name}:{64 * MIB + 1}: this" in said
    assert seconds < 20  # the scan takes 1 s; reading line by line would take over 100 s
    assert peak < AIR


@pytest.mark.slow
def test_texts_of_a_million_words_one_after_the_other(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    words = b"river stone " * (MIB // 12)
    parts = [part for i in range(3) for part in (b'{"_id": "%d", "text": "' % i, (words, LIMIT - 1), b'"}\n')]
    path = write_gzip(tmp_path / "corpus.jsonl.gz", *parts)
    code = (
        f"tokens = TextTokenizer.load({str(encoder)!r}, 16, 256).passages(Corpus.open(path).read()); "
        "print(tokens.lengths.tolist(), tokens[2][:3].tolist(), tokens[2][-1])"
    )
    said, _, peak = measure(code, path)
    assert said.startswith("[256, 256, 256]")
    assert peak < 850


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "code", "start", "end"),
    [
        ("corpus.jsonl", "Corpus.open(path).scan()", '{"_id": "1", "text": "', '"}\n'),
        pytest.param("psgs.tsv", "Corpus.open(path).scan()", "1\t", "\ttitle\n", marks=LONG),
        pytest.param("quoted.tsv", "Corpus.open(path).scan()", '1\t"', '"\ttitle\n', marks=LONG),
        pytest.param("dev.csv", "QuerySource.open(path).read()", "", "\t['x']\n", marks=LONG),
        ("dev.json", "QuerySource.open(path).read()", '[{"question": "', '", "answers": [], "positive_ctxs": []}]\n'),
    ],
)
def test_memory_of_the_longest_allowed_line(tmp_path: Path, name: str, code: str, start: str, end: str) -> None:
    """The line has an emoji, so Python needs four bytes for each character."""
    path = tmp_path / name
    path.write_text(start + "\U0001f600" + "river " * ((lines.LINE_LIMIT - 200) // 6) + end, encoding="utf-8")
    said, _, peak = measure(f"{code}; print('read')", path)
    assert said == "read"
    assert peak < AIR + 300


READERS: dict[str, tuple[Any, bytes, bytes]] = {
    "a.jsonl": (Corpus, b'{"_id": "1", "text": "%s"}\n', b"line"),
    "queries.jsonl": (QuerySource, b'{"_id": "1", "text": "%s"}\n', b"line"),
    "a.tsv": (Corpus, b"1\t%s\ttitle\n", b"line"),
    "quoted.tsv": (Corpus, b'1\t"\n%s"\ttitle\n', b"row"),
    "a.csv": (QuerySource, b"%s\t['x']\n", b"line"),
    "a.qrels": (JudgementSource, b"q 0 %s 1\n", b"line"),
    "a.trec": (RankingSource, b"q Q0 %s 1 2.0 t\n", b"line"),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", READERS)
def test_the_limit_counts_bytes_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    for module in (lines, tables):
        monkeypatch.setattr(module, "LINE_LIMIT", 3 * MIB)  # the chunks have 1 MiB
    kind, line, what = READERS[name]
    path = tmp_path / f"{name}{suffix}"
    source = f"dpr.passages:{path}" if name == "quoted.tsv" else path
    for more in (0, 1):
        text = line % (b"x" * (3 * MIB - len(line) + len(b"%s") + more))
        path.write_bytes(gzip.compress(text, 1) if suffix else text)
        if more == 0:
            list(kind.open(source).read())
            continue
        with pytest.raises(DataError, match=rf":1: .*{what.decode()} .*3 MiB; split"):
            list(kind.open(source).read())


@pytest.mark.parametrize("chunk", [1, 2, 7, 4096])
def test_lines_do_not_depend_on_chunk_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    rows = [json.dumps({"_id": str(i), "text": f"naïve\u2028🎉 {i}"}, ensure_ascii=False) for i in range(3)]
    text = f"\ufeff{rows[0]}\r\n\n \t\r\n\r\n{rows[1]}\n\n{rows[2]}"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "a.tsv").write_text('1\t"two\n\n\nlines"\tt\n\n\n2\tx\tt\n', encoding="utf-8")
    (tmp_path / "a.json").write_text(f" [\n{rows[0]} ,{rows[1]}\n, {rows[2]}\n] \n", encoding="utf-8-sig")
    monkeypatch.setattr(lines, "_CHUNK", chunk)
    assert [p.id for p in Corpus.open(tmp_path / "a.jsonl").read()] == ["0", "1", "2"]
    assert list(Corpus.open(tmp_path / "a.tsv").read()) == [Passage("1", "two\n\n\nlines", "t"), Passage("2", "x", "t")]
    assert [value["_id"] for value in read_json_array(tmp_path / "a.json")] == ["0", "1", "2"]
    (tmp_path / "a.jsonl").write_text(text.replace(rows[2], "["), encoding="utf-8", newline="")
    with pytest.raises(DataError, match=r"a\.jsonl:7: this is not JSON"):
        list(Corpus.open(tmp_path / "a.jsonl").read())
    (tmp_path / "a.tsv").write_text('1\t"a\n\nb"\tt\n\n\n2\tt\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.tsv:6: this row has 2 columns"):
        Corpus.open(f"dpr.passages:{tmp_path / 'a.tsv'}").scan()  # no line of the file has three columns


@pytest.mark.parametrize("chunk", [1, 5, 4096])
@pytest.mark.parametrize(
    ("text", "values_before", "message"),
    [
        ("[]", [], ""),
        ("[1, 23 ,456]", [1, 23, 456], ""),
        ('["]", [1, [2]], {"a": "\\u00e9,"}]', ["]", [1, [2]], {"a": "é,"}], ""),
        ("", [], r"a\.json:1: this is not JSON \(Expecting value\)"),
        ("[1,\n2", [1, 2], r"a\.json:2: this is not JSON \(Expecting ',' or '\]'\)"),
        ("[1,\n2 3]", [1, 2], r"a\.json:2: this is not JSON \(Expecting ',' or '\]'\)"),
        ("[1,\n]", [1], r"a\.json:2: this is not JSON \(Expecting value\)"),
        ('[1,\n{"a":\n7,,', [1], r"a\.json:3: this is not JSON \(Expecting property name"),
        ("[1]\n[2]", [1], r"a\.json:2: this is not JSON \(Extra data\)"),
        ("[" * 100_000, [], r"a\.json:1: this is not JSON"),
        ('"x"', [], r"a\.json: .*holds .*string"),
    ],
)
def test_a_json_array_is_read_value_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, text: str, values_before: list, message: str
) -> None:
    monkeypatch.setattr(lines, "_CHUNK", chunk)
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    values = read_json_array(tmp_path / "a.json")
    assert [value for _, value in zip(values_before, values)] == values_before
    if message:
        with pytest.raises(DataError, match=message):
            next(values)
    else:
        assert list(values) == []


@pytest.mark.slow
def test_a_json_file_is_streamed(tmp_path: Path) -> None:
    record = json.dumps({"question": "river", "positive_ctxs": [{"text": "x" * MIB}]}).encode() + b",\n"
    path = write_gzip(tmp_path / "train.json.gz", b"[", (record, 400), record[:-2], b"]")
    said, _, peak = measure("print(len(QuerySource.open(path).read()))", path)
    assert said == "401"
    assert peak < AIR


def test_a_too_long_record_is_an_error_under_any_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_LIMIT", 2 * MIB)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "a", "positive_ctxs": []}, {"question": "x" * 5 * MIB}], indent=0))
    with pytest.raises(DataError, match=r"a\.json:6: .*record, .*2 MiB"):
        TrainingSource.open(path, None).read(Policy("skip"))
