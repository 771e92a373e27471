"""Names of topologies, and the table of chips."""

from __future__ import annotations

import pytest

from jaxret.parallel.chips import CHIPS, DEVICE_KINDS, GIB, PRODUCT_PRECISIONS, find_chip, parse_topology


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        *[("v5e:4x4", 16), ("v5e:1x1", 1), ("v5p:2x2x4", 16), ("v6e:8x16", 128), ("h100:8", 8), ("a100:8", 8)],
        *[("l4:1", 1), ("l40s:4", 4), ("b200:16", 16), ("mi300x:8", 8), ("v7:2x2x1", 8)],
    ],
)
def test_devices_of_a_topology(text: str, devices: int) -> None:
    actual = parse_topology(text)
    assert actual.devices == devices
    assert str(actual) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "v3:2x2",
            "'v3' is not a known chip; the chips are v4, v5e, v5p, v6e, v7, a100, a100-40gb, l4, l40s",
        ),
        ("v5e", "v5e needs 2 number(s) after the colon, as in v5e:4x4"),
        ("v5e:16", "v5e needs 2 number(s) after the colon"),
        ("v5p:4x4", "v5p needs 3 number(s) after the colon, as in v5p:2x2x1"),
        ("h100:0", "h100 needs 1 number(s) after the colon, as in h100:8"),
        ("h200:12", "more than 8 GPUs must be machines of 8 GPUs each"),
    ],
)
def test_errors_name_valid_topologies(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 -- the message is compared below
        parse_topology(text)
    assert str(error.value).startswith(f"--topology={text}: ")
    assert message in str(error.value)


def test_names_of_topologies_for_jax() -> None:
    assert parse_topology("v5e:4x4").description() == {"platform": "tpu", "topology_name": "v5e:4x4"}
    assert parse_topology("v5e:1x1").description()["chips_per_host_bounds"] == (1, 1, 1)
    assert parse_topology("v4:2x2x1").description()["chip_config_name"] == "megacore"
    assert parse_topology("h100:8").description()["topology"] == "1x1x8"
    assert parse_topology("h100:16").description()["topology"] == "1x2x8"
    assert "device_memory_size: 84942979072" in parse_topology("h100:1").description()["target_config"]


def test_every_chip_is_complete() -> None:
    for chip in CHIPS.values():
        assert set(chip.rates) == set(PRODUCT_PRECISIONS)
        assert chip.rates["bfloat16"] >= chip.rates["float32"] > chip.rates["float32 exact"]
        assert 10 * GIB < chip.memory < 200 * GIB
        assert chip.platform in ("tpu", "cuda", "rocm")
        assert chip.link < chip.bandwidth < chip.rates["bfloat16"]
    # A TPU needs six passes of bfloat16 for an exact float32 product.
    assert CHIPS["v5e"].rates["float32 exact"] * 6 == pytest.approx(197e12)
    assert CHIPS["v7"].rates["bfloat16"] * CHIPS["v7"].devices == pytest.approx(2307e12)
    assert all(map(find_chip, DEVICE_KINDS))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("v5e:2x4", 1),
        ("v5e:4x4", 4),
        ("v5p:2x2x1", 1),
        ("v5p:2x2x2", 2),
        ("v7:2x2x2", 2),
        ("a100:8", 1),
        ("a100:16", 2),
    ],
)
def test_hosts_of_a_topology(text: str, hosts: int) -> None:
    assert parse_topology(text).hosts == hosts


@pytest.mark.parametrize(
    ("text", "same"), [("mi300:8", "mi300x:8"), ("A100-80GB:4", "a100:4"), ("tpu7x:2x2x1", "v7:2x2x1")]
)
def test_a_chip_has_the_names_of_its_makers(text: str, same: str) -> None:
    assert parse_topology(text) == parse_topology(same)
    assert parse_topology("a100-40gb:4") != parse_topology("a100:4")
