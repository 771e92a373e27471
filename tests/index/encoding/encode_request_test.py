"""A request to change encoded corpora checks itself before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxret.index.encoding.encode_request import EncodeRequest
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions

RAY = EngineOptions("ray")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give --corpus"),
        ({"append": True}, "give --corpus"),
        ({"delete": __file__, "corpus": "c"}, "--delete only deletes"),
        ({"delete": __file__, "append": True}, "--delete only deletes"),
        ({"delete": __file__, "processes": JobOptions("auto")}, "--delete .*Remove --coordinator"),
        ({"delete": "p1"}, "--delete=p1: this file does not exist"),
        ({"delete": __file__, "engine": RAY}, "--engine=ray: .* Remove --append"),
        ({"corpus": "c", "append": True, "engine": RAY}, "--engine=ray: .* Remove --append"),
        ({"corpus": "c", "processes": JobOptions("auto"), "engine": RAY}, "--engine=ray: .* Remove --append"),
    ],
)
def test_values_that_exclude_each_other_or_are_missing(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncodeRequest("w", **values)


def test_each_kind_of_request_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("p1\n")
    EncodeRequest("w", "c")
    EncodeRequest("w", "c", append=True)
    EncodeRequest("w", "c", engine=RAY)
    EncodeRequest("w", delete=str(tmp_path / "ids.txt"))
