"""A plan reports that its job cannot start."""

from __future__ import annotations

import pytest

from jaxret.configs.base import get_config
from jaxret.parallel.chips import parse_topology
from jaxret.plan.start_problems import start_problems


@pytest.mark.parametrize(
    ("verb", "topology", "keys", "expected"),
    [
        ("train", "v5e:2x4", {}, ""),
        ("train", "v5e:4x4", {}, "cannot be started so: v5e:4x4 is 4 hosts, and mesh.coordinator is empty"),
        ("train", "v5e:4x4", {"mesh.coordinator": "auto"}, ""),
        ("train", "a100:8", {"mesh.platform": "tpu"}, "cannot be started: mesh.platform is 'tpu', and a100:8 is 'gpu'"),
        ("search", "v5e:2x4", {}, ""),
        ("search", "v5e:4x4", {"mesh.coordinator": "auto"}, "4 hosts: start jaxret search on each, with --coordinator"),
        ("encode", "v5e:4x4", {}, "start jaxret encode on each, with --coordinator=auto"),
        ("encode", "h100:16", {}, "start jaxret encode on each, each as a separate job"),
    ],
)
def test_problems_that_prevent_a_start(verb: str, topology: str, keys: dict[str, str], expected: str) -> None:
    config = get_config()
    config.update_from_flattened_dict(keys)
    problems = list(start_problems(verb, config, parse_topology(topology)))
    assert len(problems) == bool(expected)
    assert not expected or expected in problems[0]
