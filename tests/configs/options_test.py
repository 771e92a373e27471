"""Options of commands: values that every option refuses."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import jaxret

from jaxret.data.chunks import ChunkOptions
from jaxret.experiments.probe.probe_options import ProbeOptions
from jaxret.experiments.report.report_options import ReportOptions
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.mining.generation_options import GenerationOptions
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.runs.job_options import JobOptions
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.search_options import IndexOptions
from jaxret.serving.serve_options import ServeOptions


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (BM25Settings, "k1"),
        (BM25Settings, "b"),
        (DecodingOptions, "temperature"),
        (DecodingOptions, "top_p"),
        (DecodingOptions, "length_penalty"),
        (EncodeOptions, "lease"),
        (GenerationOptions, "lease"),
        (ServeOptions, "answer_seconds"),
    ],
)
def test_nan_and_infinity_are_refused(kind: Any, name: str, value: str) -> None:
    """NaN is not below any bound, and would become the score of every passage."""
    with pytest.raises(ValueError, match=rf"^{name} .*{value}; .*finite number$"):
        kind(**{name: float(value)})


def options_classes() -> list[Any]:
    """Return every class of the package with a name that ends in Options."""
    folder = Path(jaxret.__file__).parent
    pairs = [
        (".".join(path.relative_to(folder.parent).with_suffix("").parts), name)
        for path in sorted(folder.rglob("*.py"))
        for name in re.findall(r"^class (\w+Options)\b", path.read_text(), re.MULTILINE)
    ]
    return [pytest.param(module, name, id=name) for module, name in pairs]


@pytest.mark.parametrize(("module", "name"), options_classes())
def test_options_are_checked_when_they_are_made_and_stay_as_they_are(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    assert kind.__dataclass_params__.frozen
    for field in fields(kind):
        options = object.__new__(kind)  # typeguard would check types in __init__
        for each in fields(kind):
            object.__setattr__(options, each.name, object() if each is field else each.default)
        with pytest.raises(ValueError, match=f"^{field.name} is <object object.*>; it must be "):
            options.__post_init__()


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (IndexOptions, {}, "factory is ''; .* IVF4096,PQ64"),
        (IndexOptions, {"factory": "SQ8", "qrels": "x"}, "qrels needs queries"),
        (IndexOptions, {"factory": "SQ8", "split": "dev"}, "split needs queries"),
        (IndexOptions, {"factory": "SQ8", "explicit_fields": ("split",)}, "split needs queries"),
        (IndexOptions, {"factory": "SQ8", "checkpoint": "last"}, "checkpoint needs queries"),
        (IndexOptions, {"factory": "SQ8", "sample": 0}, "sample is 0; .* 1$"),
        (IndexOptions, {"factory": "SQ8", "seed": -1}, "seed is -1; .* 0$"),
        (JobOptions, {"num_processes": 0}, "num_processes is 0; .* 1$"),
        (JobOptions, {"process_id": -1}, "process_id is -1; .* 0$"),
        (JobOptions, {"initialization_timeout": 0}, "initialization_timeout is 0; .* 1$"),
        (ProbeOptions, {"seed": -1}, "seed is -1; .* 0$"),
        (ReportOptions, {"queries": -1}, "queries is -1; .* 0$"),
        (ServeOptions, {"port": 65536}, "port is 65536; .* 65535$"),
        (ChunkOptions, {}, ".* sentences, equal=N and words=N$"),
    ],
)
def test_an_error_states_the_field_and_what_is_right(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**values)
