"""Answer matching against DPR's golden values, and top-k accuracy against values by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.data.formats import QuerySource
from jaxret.data.records import Query
from jaxret.evaluation.answer_matching import AnswerMatcher, answer_accuracy, answer_ranks, has_answer, tokenize

GOLDEN = [
    ("U.S.", "in the U.S. today", True),
    ("US", "in the U.S. today", False),
    ("Beyoncé", "Beyonce sang", False),  # accents are kept
    ("Beyoncé", "BEYONCE\u0301", True),  # accents are normalized
    ("1,000", "about 1,000 men", True),
    ("1000", "about 1,000 men", False),
    ("don't", "we don’t", False),
    ("cat", "the cats", False),
    ("Straße", "STRASSE", False),
    ("a\tb", "A B", True),
]


@pytest.mark.parametrize(("answer", "text", "expected"), GOLDEN)
def test_has_answer_golden_values(answer: str, text: str, expected: bool) -> None:
    assert has_answer(text, [answer]) is expected


def test_a_matcher_of_many_texts_equals_single_matches() -> None:
    matcher = AnswerMatcher()
    for answer, _, _ in [*GOLDEN, *GOLDEN]:
        assert matcher([text for _, text, _ in GOLDEN], Query("q", "?", (answer, ""))) == [
            has_answer(text, [answer]) for _, text, _ in GOLDEN
        ]


@pytest.mark.parametrize("answer", ["", "  ", "\t\n", "\x00", "\u200b"])
def test_an_answer_without_tokens_occurs_nowhere(answer: str) -> None:
    assert not has_answer("anything at all", [answer])
    assert has_answer("anything at all", [answer, "at all"])


def test_answers_match_consecutive_whole_tokens() -> None:
    text = "the quick brown fox"
    assert has_answer(text, ["quick brown"])
    assert has_answer(text, ["fox"])
    assert not has_answer(text, ["the brown"])
    assert not has_answer(text, ["quick brow"])
    assert not has_answer(text, ["uick brown"])
    assert not has_answer(text, [])


def test_joining_tokens_equals_comparing_lists() -> None:
    """The substring search must agree with the definition, sub-list equality, on texts of few distinct tokens."""

    def by_definition(text: str, answer: str) -> bool:
        words, answer_tokens = tokenize(text), tokenize(answer)
        return bool(answer_tokens) and any(
            words[i : i + len(answer_tokens)] == answer_tokens for i in range(len(words))
        )

    pieces = ["a", "ab", "b", "a b", "b a", "a-b", "ba", "a b a", "-", "ab a"]
    texts = [f"{x} {y}" for x in pieces for y in pieces]
    outcomes = [(has_answer(text, [answer]), by_definition(text, answer)) for text in texts for answer in pieces]
    assert all(ours == expected for ours, expected in outcomes)
    assert {expected for _, expected in outcomes} == {True, False}


QUERIES = [Query("q1", "?", ("red",)), Query("q2", "?", ("blue", "sky")), Query("q3", "?", ("gone",))]
TEXTS = {"p1": "green grass", "p2": "a red rose", "p3": "the sky"}
RUN = {"q1": [("p1", 3.0), ("p2", 2.0)], "q2": [("p3", 1.0)]}  # q3 has no results


def test_answer_ranks_and_accuracy_by_hand() -> None:
    assert answer_ranks(RUN, QUERIES, TEXTS, depth=2) == {"q1": 2, "q2": 1, "q3": None}
    assert answer_ranks(RUN, QUERIES, TEXTS, depth=1) == {"q1": None, "q2": 1, "q3": None}
    ranks = answer_accuracy(RUN, QUERIES, TEXTS, [1, 2, 100])
    assert ranks.mean == {"Accuracy@1": 1 / 3, "Accuracy@2": 2 / 3, "Accuracy@100": 2 / 3}
    assert ranks.per_query["Accuracy@1"] == {"q1": 0.0, "q2": 1.0, "q3": 0.0}
    assert (ranks.queries_expected, ranks.queries_found) == (3, 2)


def test_accuracy_with_missing_texts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'p3' \(rank 1 of query 'q2'\) has no text"):
        answer_accuracy(RUN, QUERIES, {"p1": "", "p2": ""}, [1])


def test_answers_as_regular_expressions(data_dir: Path) -> None:
    """CuratedTREC's patterns match as in DPR: anywhere, in any case, and across both ways to write an accent."""
    queries = QuerySource.open(data_dir / "format-samples" / "dpr" / "curatedtrec-like.qa.csv").read()
    texts = {"a": "As NANCY she sings.", "b": "by Coco-Chanel, or Jean Patou", "c": "on 18 May 1974", "d": "nothing"}
    ranks = {query.id: [("d", 2.0), (key, 1.0)] for query, key in zip(queries, "adbc", strict=True)}
    first_ranks = answer_ranks(ranks, queries, texts, 2, "regex")
    assert list(first_ranks.values()) == [2, None, 2, 2]
    assert list(answer_ranks(ranks, queries, texts, 2).values()) == [None] * 4, (
        "control: as strings, the patterns match nothing"
    )
    marks = [Query("q", "?", ("Beyonc\u00e9|\\d{4}", " "))]
    assert answer_ranks({"q": [("x", 1.0)]}, marks, {"x": "BEYONCE\u0301"}, 1, "regex") == {"q": 1}
    assert answer_ranks({"q": [("x", 1.0)]}, marks, {"x": "Beyonce"}, 1, "regex") == {"q": None}
    broken = [Query("q", "?", ("(a",))]
    with pytest.raises(ValueError, match=r"'q': .*'\(a' .*expression"):
        answer_ranks({"q": [("x", 1.0)]}, broken, {"x": "a"}, 1, "regex")
