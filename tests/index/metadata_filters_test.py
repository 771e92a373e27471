"""Ranges in filters: numbers, dates and times, compared exactly, and the errors that say what a field has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import Corpus
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.update import append_corpus, delete_ids
from jaxret.index.metadata_filters import Filter, FilterError, matching_rows, ordered_value
from jaxret.runs.run import Run, open_run
from tests.pipeline import untrained_run, write_data, write_encoder

BIG = 9_007_199_254_740_993  # 2^53 + 1, which is not a float
RECORDS: list[dict[str, Any]] = [
    {"year": 2015, "tags": [1, 20], "day": "2024-05-01", "at": "2024-05-01T10:00:00Z", "serial": BIG, "a:b": 1},
    {"year": "2016", "tags": [8, 9], "day": "2024-04-30", "at": "2024-05-01T13:00:00+02:00", "serial": BIG - 1},
    {"year": 2016.5, "tags": ["x"], "day": "soon", "at": "2024-05-01T10:00:00.5Z", "serial": BIG + 1, "a": "b<2"},
    {"year": True, "day": "2024-05-01T10:00:00", "at": "2024-05-01 10:00", "serial": -5e-324, "deep": {"er": 3}},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("ranges")
    write_encoder(root / "encoder")
    write_data(root / "data")
    untrained_run(root / "run", root / "encoder", root / "data", head__token="mean", normalize=True)
    return open_run(root / "run")


def write_corpus(path: Path, records: list[dict[str, Any]], first: int = 0) -> Corpus:
    lines = [json.dumps({"_id": f"p{first + n}", "text": "river", "metadata": one}) for n, one in enumerate(records)]
    path.write_text("\n".join(lines) + "\n")
    return Corpus.open(path)


@pytest.fixture(scope="module")
def corpus(run: Run, tmp_path_factory: pytest.TempPathFactory) -> EncodedCorpus:
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    return open_encoded(encode_corpus(run, write_corpus(path, RECORDS), progress=False).folder)


@pytest.mark.table
@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        (["year>=2015"], [0, 1, 2]),
        (["year>2015"], [1, 2]),
        (["year<2016"], [0]),
        (["year<=2.016e3"], [0, 1]),
        (["year>2015", "year<2016.5"], [1]),
        (["year>=2015", "year:2015", "year:true"], [0]),
        (["tags>5", "tags<10"], [1]),  # no value of row 0 is in both
        (["tags>5", "tags:9", "tags:1"], [1]),
        ([f"serial>{BIG - 1}"], [0, 2]),
        ([f"serial>={BIG}", f"serial<={BIG}"], [0]),
        (["serial<0"], [3]),
        (["serial>-1e-400"], [0, 1, 2]),
        (["day>2024-04-30"], [0]),
        (["day>=2024-05-01T09:59"], [3]),
        (["at>2024-05-01T10:00:00Z"], [1, 2]),
        (["at<2024-05-01T10:00:00.50+00:00"], [0]),
        (["at>2024-05-01T10:00:00.4999999999Z", "at<=2024-05-01T11:00:00Z"], [1, 2]),
        (["at>=2024-05-01T10:00:00"], [3]),
        (["deep.er>=3", "year:true"], [3]),
        (["a:b>=1"], [0]),  # the longest field
        ([Filter("a", ":", "b<2")], [2]),
        (["year>=2016", "day:soon"], [2]),
    ],
)
def test_ranges(filters: list[str], rows: list[int], corpus: EncodedCorpus) -> None:
    assert matching_rows(corpus, filters).tolist() == rows


@pytest.mark.table
@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["year>2020"], "filter 'year>2020': .* year is 2015 to 2016.5$"),
        (["year>2015", "year<2016"], "filter 'year>2015 year<2016': .* year is 2015 to 2016.5$"),
        (["year>=2020-01-01"], r"no value of year is a date: year is '2015', "),
        (["at>2024-05-01"], "no value of at is a date: at is '2024"),
        (["day>=2024-05-01T10:00:00Z"], "no value of day is a date with a time and a zone: day is"),
        (["serial>1", "serial<2020-01-01"], f"serial is -5e-324 to {BIG + 1}; no value of serial is a date: "),
        (["year>=late"], "filter 'year>=late': the bound must be a number .* 2024-05-01"),
        (["day>=2024-13-01"], "filter 'day>=2024-13-01': the bound"),
        (["year>=007"], "the bound must be a number"),
        (["year=>5"], "no passage has a field 'year='; the fields are a, a:b"),
        (["size<5"], "no passage has a field 'size'; the fields are a, a:b"),
        (["year>=2015", "year:2014"], "filter 'year:2014': no passage has that value; year is"),
        (["year:>=2015"], "filter 'year:>=2015': .* year>=2015$"),
        (["year"], "FIELD:VALUE, or a range"),
    ],
)
def test_a_range_without_a_passage_is_an_error(filters: list[str], message: str, corpus: EncodedCorpus) -> None:
    with pytest.raises(FilterError, match=message):
        matching_rows(corpus, filters)


def test_values_without_an_order() -> None:
    for text in (
        "",
        "1.",
        ".5",
        "+1",
        "0x1",
        "NaN",
        "Infinity",
        "1_0",
        "١",
        "true",
        "2024-02-30",
        "24-05-01",
        " 1",
        "2024-05-01T10",
    ):
        assert ordered_value(text) is None, text
    assert ordered_value("1e99999999999999999999") is None
    for text in ("-0", "1E5", "1e999999", "2024-02-29", "0001-01-01T00:00:00+12:00", "9999-12-31T23:59:59-12"):
        assert ordered_value(text), text


def place(value: Any) -> tuple[str, Any] | None:
    """Return the kind and the order of a value, by other means than the package."""
    if isinstance(value, bool) or value is None or value in ("red", "green"):
        return None
    if isinstance(value, int | float):
        return "number", Fraction(value) if isinstance(value, int) else Fraction(repr(value))
    return ("day", value) if len(value) == 10 else ("time", datetime.fromisoformat(value).timestamp())


def record(random_state: random.Random) -> dict[str, Any]:
    numbers: list[Callable[[], Any]] = [
        lambda: random_state.randint(-5, 5),
        lambda: round(random_state.uniform(-5, 5), 1),
        lambda: BIG * 1000 + random_state.randint(-2, 2),
        lambda: random_state.choice(["red", "green", True, None]),
    ]
    day = f"2024-0{random_state.randint(1, 9)}-1{random_state.randint(0, 9)}"
    zone = random_state.choice(["Z", "+02:00", "-09:30"])
    return {
        "number": random_state.choice(numbers)(),
        "list": [random_state.choice(numbers)() for _ in range(random_state.randint(0, 3))],
        "deep": {"day": random_state.choice([day, "red", 7])},
        "time": random_state.choice([day, f"{day}T1{random_state.randint(0, 9)}:30:00{zone}"]),
    }


def values_of(one: dict[str, Any], name: str) -> list[Any]:
    value = one["deep"]["day"] if name == "deep.day" else one[name]
    return value if isinstance(value, list) else [value]


def matches(one: dict[str, Any], conditions: list[tuple[str, str, Any]]) -> bool:
    for name in {name for name, _, _ in conditions}:
        equal = [json.dumps(bound) for field, sign, bound in conditions if field == name and sign == ":"]
        ranges = [(sign, place(bound)) for field, sign, bound in conditions if field == name and sign != ":"]

        def fits(value: Any, equal: list[str] = equal, ranges: Any = ranges) -> bool:
            if value is None or (equal and json.dumps(value) not in equal):
                return False
            own = place(value)
            for sign, bound in ranges:
                if own is None or own[0] != bound[0]:
                    return False
                left, right = own[1], bound[1]
                if not {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[sign]:
                    return False
            return True

        if not any(fits(value) for value in values_of(one, name)):
            return False
    return True


@pytest.mark.slow
def test_random_filters_equal_a_loop_over_the_records(run: Run, tmp_path: Path) -> None:
    """The corpus has three parts and deleted passages."""
    random_state = random.Random(5)
    records = [record(random_state) for _ in range(500)]
    folder = encode_corpus(run, write_corpus(tmp_path / "x.jsonl", records[:300]), progress=False).folder
    append_corpus(run, write_corpus(tmp_path / "y.jsonl", records[300:480], 300), folder, progress=False)
    append_corpus(run, write_corpus(tmp_path / "z.jsonl", records[480:], 480), folder, progress=False)
    deleted = random_state.sample(range(500), 60)
    delete_ids(folder, {f"p{n}": "" for n in deleted})
    encoded_corpus, counts = open_encoded(folder), list[int]()
    while len(counts) < 200:
        conditions = []
        for _ in range(random_state.randint(1, 4)):
            name = random_state.choice(["number", "list", "deep.day", "time"])
            bound = random_state.choice(values_of(random_state.choice(records), name) or [0])
            signs = [":"] if place(bound) is None else [":", ">", ">=", "<", "<="]
            conditions.append((name, random_state.choice(signs), bound))
        if any(bound is None for _, _, bound in conditions):
            continue
        texts = [
            f"{name}{sign}{bound if isinstance(bound, str) else json.dumps(bound)}" for name, sign, bound in conditions
        ]
        expected = [n for n, one in enumerate(records) if matches(one, conditions)]
        try:
            found_rows = matching_rows(encoded_corpus, texts)
        except FilterError:  # one field alone has no such passage
            assert not expected, texts
            continue
        assert found_rows.tolist() == expected, texts
        present = encoded_corpus.select(found_rows)
        assert present.total_rows == len(set(expected) - set(deleted))
        counts.append(len(expected))
    assert len(set(counts)) > 50, "control: the filters differ"
