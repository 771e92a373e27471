"""Texts of flags, and JSON files with digests: each is read, or refused by the error that its reader documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxret.configs import change_config, find_config, load_config
from jaxret.data.formats import parse_source
from jaxret.evaluation.metrics import parse_measure
from jaxret.experiments.compare_runs import split_argument
from jaxret.experiments.searches.evaluation_measures import choose_measures
from jaxret.experiments.searches.search_job import parse_sizes
from jaxret.experiments.sweeps.grid import read_grid
from jaxret.index.parts_list import CorpusPart, part_name, read_parts, write_parts
from jaxret.index.shards import ShardError
from jaxret.parallel.chips import parse_topology
from jaxret.plan.workload import parse_lengths
from jaxret.runs.contract import VERSION, require_same_contract
from jaxret.runs.mismatch import ContractError, flatten
from jaxret.search.approximate.seismic_index import SEARCH_SETTINGS, parse_settings
from jaxret.search.search_options import parse_candidates
from jaxret.storage.atomic import read_with_digest, with_digest, write_json
from tests.fuzz.refusal import refusal

# parser -> valid texts, of which pieces are mixed with any text
PARSERS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "measure": (parse_measure, ["nDCG@10", "RR(rel=2)@10", "AP", "R@100"]),
    "candidates": (parse_candidates, ["mean:100", "muvera:1000"]),
    "topology": (parse_topology, ["h100:8", "v5e:4x4", "v5p:2x2x1"]),
    "source": (parse_source, ["beir.texts:corpus.jsonl", "tfds:a/b", "hf:a/b"]),
    "argument": (split_argument, ["name=runs/a,runs/b", "runs/a"]),
    "seismic": (lambda text: parse_settings(text, SEARCH_SETTINGS), ["query_cut=10,heap_factor=0.7"]),
    "grid": (
        lambda text: read_grid([text], [], load_config("base"), []),
        ["loss.temperature=0.5,1", "train.batch_size=8,16", "head.mlr.chosen=(4,),(4,6)"],
    ),
    "lengths": (lambda text: parse_lengths(text.split(",")), ["10,80", "1.5,2"]),
    "config": (find_config, ["base", "minilm:mlr", "recipes/mlr_mined"]),
}


@st.composite
def mixed(draw: st.DrawFn, valid: list[str]) -> str:
    """Draw a valid text with pieces of others and any characters in it."""
    text = draw(st.sampled_from(valid))
    for _ in range(draw(st.integers(0, 3))):
        start, stop = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = (
            text[:start]
            + draw(st.text(max_size=5) | st.sampled_from(valid) | st.sampled_from(":@,=x0-1."))
            + text[stop:]
        )
    return text


@pytest.mark.parametrize("name", PARSERS)
@hypothesis.given(data=st.data())
def test_a_text_is_parsed_or_refused(name: str, data: st.DataObject) -> None:
    parse, valid = PARSERS[name]
    for text in valid:
        parse(text)
    text = data.draw(mixed(valid))
    assert refusal(lambda: parse(text), ValueError, FileNotFoundError) != ""


LONG = "1" * 5_000  # digits; Python parses at most 4,300


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_measure, f"nDCG@{LONG}", "^unknown measure 'nDCG@1111"),
        (parse_measure, f"RR(rel={LONG})@10", r"^unknown measure 'RR\(rel=1111"),
        (lambda text: choose_measures([text], 10), f"Accuracy@{LONG}", "^unknown measure 'Accuracy@1111"),
        (parse_candidates, f"mean:{LONG}", "^candidates is 'mean:1111"),
        (lambda text: parse_sizes([text]), LONG, "^--dimension: '1111"),
        (lambda text: parse_settings(text, SEARCH_SETTINGS), f"query_cut={LONG}", "must be query_cut=NUMBER"),
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_by_its_name(
    parse: Callable[[str], Any], text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@hypothesis.given(
    key=st.sampled_from(["train.batch_size", "normalize", "head.name", "optimizer.learning_rate", "head.mlr.chosen"]),
    value=st.data(),
)
def test_a_config_takes_a_value_or_refuses_it(key: str, value: st.DataObject) -> None:
    anything = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=3)
    )
    changes = {key: value.draw(anything)}
    message = refusal(lambda: change_config(load_config("base"), changes, "here"), ValueError, TypeError)
    assert message is None or key in message


@hypothesis.given(content=st.data())
def test_json_with_a_digest_is_whole_or_refused(
    content: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = content.draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
    values.pop("sha256", None)
    path = tmp_path_factory.mktemp("json") / "file.json"
    write_json(path, with_digest(values))
    assert read_with_digest(path) == values
    written = path.read_bytes()
    place = content.draw(st.integers(0, len(written) - 1))
    changed = written[:place] + bytes([written[place] ^ content.draw(st.integers(1, 255))]) + written[place + 1 :]
    path.write_bytes(changed)
    message = refusal(lambda: require_equal(read_with_digest(path), values), ValueError)
    assert message is None or str(path) in message


@hypothesis.given(content=st.data())
def test_a_list_of_parts_is_whole_or_refused(content: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("parts")
    deleted = content.draw(st.sets(st.integers(0, 9), max_size=4))
    appended = "1" * 64
    parts = [CorpusPart("", "0" * 64, 10).with_deleted(deleted), CorpusPart(part_name(1, appended), appended, 3)]
    write_parts(folder, parts)
    entries = [part.entry() for part in parts]
    assert [part.entry() for part in read_parts(folder)] == entries
    path: Path = folder / "parts.json"
    stored = json.loads(path.read_text())
    key = content.draw(st.sampled_from(sorted(stored)))
    stored[key] = content.draw(st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2))
    path.write_text(json.dumps(stored if content.draw(st.booleans()) else with_digest(stored)))
    message = refusal(lambda: require_equal([part.entry() for part in read_parts(folder)], entries), ShardError)
    assert message is None or str(path) in message


CONTRACT = {
    "version": VERSION,
    "special_ids": {"pad": 0, "cls": 2},
    "tokenizer": {"vocabulary": "0" * 64},
    "query_length": 32,
    "passage_length": 128,
    "head": {"name": "mlr", "chosen": [4, 6]},
}


@hypothesis.given(content=st.data())
def test_contracts_are_equal_or_the_key_is_named(content: st.DataObject) -> None:
    """A changed or additional value, of any type and at any depth, is refused with its key and value."""
    changed: dict[str, Any] = json.loads(json.dumps(CONTRACT))
    require_same_contract(CONTRACT, changed, "the file", "the model", "Remedy.")
    key = content.draw(st.sampled_from(sorted(set(flatten(CONTRACT)) - {"version"})) | st.just("head.added"))
    *groups, last = key.split(".")
    tree = changed[groups[0]] if groups else changed
    value = content.draw(st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers()))
    hypothesis.assume(last not in tree or value != tree[last])
    tree[last] = value
    message = refusal(lambda: require_same_contract(CONTRACT, changed, "a file", "a model", "Remedy."), ContractError)
    assert message is not None
    assert f"{key}: " in message
    assert repr(value) in message


def require_equal(content: object, written: object) -> None:
    """Fail if changed content was accepted."""
    assert content == written
