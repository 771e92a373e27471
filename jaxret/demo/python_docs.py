"""The embedded demo data set: the documentation of the Python that runs it.

Corpus: the docstrings of the public modules, classes, functions and methods of the standard library, under the names
a user types. Training pairs: the summary sentence of a docstring as the query, the rest of it as the passage.
Test: questions written by hand (`python_docs_questions.jsonl`) against the whole corpus. A passage that answers a test
question may also be in training as a (summary -> rest) pair; the questions themselves never are. What the test
measures is question -> passage among all passages.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

from tqdm import tqdm

from jaxret.data.records import Judgement, Passage, Query
from jaxret.demo.python_sources import EXCLUDED, PUBLIC_NAMES, Library, is_private

# Where one docstring has several names, the shortest is kept, except these, which people know better.
PREFERRED_NAMES = {"IOError": "OSError", "datetime.date.strftime": "datetime.datetime.strftime"}
MIN_PASSAGE_WORDS = 4  # fewer say nothing that the name does not
MIN_QUERY_WORDS = 3  # a heading, not a sentence
MAX_QUERY_WORDS = 48  # a paragraph without a full stop, not a sentence
MIN_REST_WORDS = 8  # less does not say what the summary is about
DEV_SHARE = 0.1
# Up to a full stop that ends the text or is followed by something that can start a sentence.
SENTENCE = re.compile(r"(?:.*?(?<!e\.g)(?<!i\.e)(?<!\bvs)(?<!etc)[.!?](?=\s+[^\sa-z]|\s*\Z)|.*\Z)", re.DOTALL)
CALL = re.compile(r"\s*[A-Za-z_][\w.]*\(")
# A signature that `description_start` did not recognise (`f(x) --> y`, `b(reak) line`), or the start of a list.
NOT_A_SENTENCE = re.compile(r"->|^\S*\(|^\W|:$")
QUESTIONS_FILE = "python_docs_questions.jsonl"


@dataclass(frozen=True, slots=True)
class Pair:
    """A training example: the passage is the docstring of `query.id` without the sentence that is the query."""

    query: Query
    passage: Passage


def read_docstrings(progress: bool = False) -> list[Passage]:
    """The corpus: one passage for each distinct docstring of this Python, sorted by id.

    The id and the title are the shortest public name that carries the docstring. Takes a few seconds and prints nothing
    (but a bar, with `progress`). The passages are the same on every run of the same Python. Raises RuntimeError if the
    sources are not installed.
    """
    library = Library()
    names: dict[str, set[str]] = {}  # text -> the names it documents
    with bulk_parsing():
        if library.load("json") is None:
            raise RuntimeError(f"no sources of the standard library under {library.root}; install Python with them")
        roots = sorted(sys.stdlib_module_names | PUBLIC_NAMES.keys())
        for root in tqdm(roots, "read docstrings", unit="module", disable=not progress, delay=1):
            if root in PUBLIC_NAMES or not (is_private(root) or root in EXCLUDED):
                for module in library.submodules(root):
                    for name, docstring in library.documents(module):
                        names.setdefault(clean(docstring), set()).add(name)
    passages = []
    for text, candidates in names.items():
        if len(text.split()) >= MIN_PASSAGE_WORDS:
            name = min(candidates, key=lambda name: (name.count("."), len(name), name))
            name = PREFERRED_NAMES.get(name, name)
            passages.append(Passage(id=name, title=name, text=text))
    return sorted(passages, key=lambda passage: passage.id)


@contextlib.contextmanager
def bulk_parsing() -> Iterator[None]:
    """No warnings: deprecated modules and old escapes are not our caller's concern. And no garbage collection: it
    walks a million nodes of syntax trees again and again to find nothing, and doubles the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collecting:
            gc.enable()


def clean(docstring: str) -> str:
    """Removes indentation, trailing white space and all but one of several blank lines: paragraphs stay paragraphs."""
    lines = (line.rstrip() for line in inspect.cleandoc(docstring).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def training_pairs(passages: Iterable[Passage]) -> tuple[list[Pair], list[Pair]]:
    """(train, dev): the summary sentence of each docstring with the rest of it.

    A docstring gives a pair if its summary is a real sentence of its own, enough text remains, and the pair cannot be
    won by copying: the words of the summary do not occur, in that order, in the passage. A summary that several
    docstrings share tells none of them apart and is left out. A hash of the id decides the side, so that a pair is on
    the same side whatever else is in the corpus; about one in ten is dev.
    """
    pairs = [pair for passage in passages if (pair := split_summary(passage))]
    uses = Counter(normalise(pair.query.text) for pair in pairs)
    train: list[Pair] = []
    dev: list[Pair] = []
    for pair in pairs:
        if uses[normalise(pair.query.text)] == 1:
            digest = hashlib.sha256(pair.passage.id.encode()).digest()
            (dev if digest[0] < DEV_SHARE * 256 else train).append(pair)
    return train, dev


def split_summary(passage: Passage) -> Pair | None:
    """The pair that a passage gives, or None. Signatures stay in the passage: `range(stop) -> range object`."""
    start = description_start(passage.text)
    paragraph = re.match(r".*?(?=\n\s*\n|\Z)", passage.text[start:], re.DOTALL)
    sentence = SENTENCE.match(paragraph.group()) if paragraph else None
    if sentence is None:
        return None
    end = start + sentence.end()
    query = " ".join(sentence.group().split()).rstrip(".")
    rest = clean(f"{passage.text[:start].rstrip()}\n\n{passage.text[end:].strip()}")
    words = len(query.split())
    usable = MIN_QUERY_WORDS <= words <= MAX_QUERY_WORDS and not NOT_A_SENTENCE.search(query)
    if not usable or len(passage.text[end:].split()) < MIN_REST_WORDS:
        return None
    if f" {normalise(query)} " in f" {normalise(passage.title)} {normalise(rest)} ":
        return None
    return Pair(Query(passage.id, query), Passage(passage.id, rest, passage.title))


def description_start(text: str) -> int:
    """Where the prose of a docstring starts, after the signatures that compiled functions put in front of it."""
    start = 0
    while call := CALL.match(text, start):
        end, depth = call.end(), 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        line_end = text.find("\n", end) if "\n" in text[end:] else len(text)
        after = text[end:line_end]
        if described := re.match(r"(\s*--?>\s*[^.,:]+?)?\s*(\.|,|:|--?)\s+(?=[A-Za-z].*\s)", after):
            return end + described.end()
        if after.strip() and not re.match(r"\s*(--?>|:\s*$)", after):
            break  # "open() is a function that": a sentence, not a signature
        start = line_end
    return start + len(text[start:]) - len(text[start:].lstrip())


def normalise(text: str) -> str:
    """Lower-case words separated by single spaces, for comparing texts regardless of layout and punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def load_questions(corpus_ids: Container[str]) -> tuple[list[Query], list[Judgement], list[str]]:
    """(queries, judgements, skipped): the questions written by hand, numbered q001... by their line in the file.

    A name that this Python does not have is left out, and so is a question none of whose names it has; `skipped` says
    which, in a sentence each. The other questions keep their numbers. Raises ValueError, naming the line, if the file
    is malformed.
    """
    queries: list[Query] = []
    judgements: list[Judgement] = []
    skipped: list[str] = []
    lines = resources.files("jaxret.demo").joinpath(QUESTIONS_FILE).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        question, relevant = parse_question(line, number)
        query_id = f"q{number:03d}"
        found = [name for name in relevant if name in corpus_ids]
        skipped += [f"{query_id}: {name!r} is not in the corpus" for name in relevant if name not in found]
        if found:
            queries.append(Query(query_id, question))
            judgements += [Judgement(query_id, name, 1) for name in found]
        else:
            skipped.append(f"{query_id}: question skipped, none of its names is in the corpus: {question!r}")
    return queries, judgements, skipped


def parse_question(line: str, number: int) -> tuple[str, list[str]]:
    place = f"{QUESTIONS_FILE}:{number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON ({error.msg}); expected one object a line") from error
    match record:
        case {"question": str(question), "relevant": [str(), *_] as relevant} if question and len(record) == 2:
            if all(isinstance(name, str) for name in relevant) and len(set(relevant)) == len(relevant):
                return question, relevant
    raise ValueError(f'{place}: found {line!r}, expected {{"question": text, "relevant": [distinct names]}}')
