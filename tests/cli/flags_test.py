"""Flags are made from the fields of a dataclass, and the dataclass is made from the flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field

import pytest
from absl import flags

from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs.options import option


@dataclass(frozen=True)
class Brush:
    brush_width: int = option(3, "width", lower_bound=1)


@dataclass(frozen=True)
class Painting:
    subject: str  # without a flag
    canvas: str = option(MISSING, "size")
    frame: str = "none"
    shades: tuple[int, ...] = option((), "shades", parse=lambda texts: tuple(map(int, texts)))
    layers: tuple[str, ...] = option((), "layers", flag="paint_layer")
    style: str = option("", "style", ("flat", "rough"))
    brush: Brush = field(default_factory=Brush)
    price: float | None = option(None, "price")
    explicit_fields: tuple[str, ...] = ()


@pytest.fixture
def painting() -> Iterator[OptionFlags[Painting]]:
    made = OptionFlags(Painting, frame=define_flag(option("oak", "frame", flag="picture_frame")))
    flags.FLAGS.mark_as_parsed()
    yield made
    for holder in made.holders.values():
        delattr(flags.FLAGS, holder.name)


def test_flags_have_the_order_of_the_fields(painting: OptionFlags[Painting]) -> None:
    """The flags of a dataclass that is a field are at the place of the field, and so is a flag that the caller adds."""
    names = [holder.name for holder in painting.holders.values()]
    assert names == ["canvas", "picture_frame", "shades", "paint_layer", "style", "brush_width", "price"]
    required = [name for name in names if any("must have" in check.message for check in flags.FLAGS[name].validators)]
    assert required == ["canvas"]


def test_a_dataclass_has_the_values_of_the_flags(painting: OptionFlags[Painting]) -> None:
    flags.FLAGS["canvas"].parse("a4")
    assert painting(subject="pear") == Painting("pear", "a4", "oak", explicit_fields=("canvas",)), (
        "the other fields have their defaults, and so have those of a choice"
    )
    values = {"shades": "1,20", "paint_layer": "oil,wax", "style": "flat", "brush_width": "3"}
    for name, value in values.items():
        flags.FLAGS[name].parse(value)
    expected = Painting(
        *("pear", "a4", "oak", (1, 20), ("oil,wax",), "flat"),
        explicit_fields=("canvas", "shades", "layers", "style", "brush_width"),
    )
    assert painting(subject="pear") == expected
    assert painting(subject="pear", brush=Brush(9)).brush == Brush(9)
