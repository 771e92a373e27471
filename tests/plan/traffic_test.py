"""Main memory traffic of programs, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxret.plan.hlo import parse_hlo
from jaxret.plan.traffic import traffic

PARTS = """HloModule m

%sliced (v: f32[5,10,4], i: s32[]) -> f32[10,4] {
  %v = f32[5,10,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %part = f32[1,10,4]{2,1,0} dynamic-slice(%v, %i, %i, %i), dynamic_slice_sizes={1,10,4}
  ROOT %flat = f32[10,4]{1,0} bitcast(%part)
}

%product (q: f32[6,4], v: f32[5,10,4], i: s32[]) -> f32[6,10] {
  %q = f32[6,4]{1,0} parameter(0)
  %v = f32[5,10,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %held = f32[10,4]{1,0} fusion(%v, %i), kind=kLoop, calls=%sliced
  ROOT %scores = f32[6,10]{1,0} dot(%q, %held), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%keep (all: f32[5,6,10], one: f32[6,10], i: s32[]) -> f32[5,6,10] {
  %all = f32[5,6,10]{2,1,0} parameter(0)
  %one = f32[6,10]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,6,10]{2,1,0} bitcast(%one)
  ROOT %kept = f32[5,6,10]{2,1,0} dynamic-update-slice(%all, %row, %i, %i, %i)
}

%body (s: (s32[], f32[6,4], f32[5,10,4], f32[5,6,10])) -> (s32[], f32[6,4], f32[5,10,4], f32[5,6,10]) {
  %s = (s32[], f32[6,4]{1,0}, f32[5,10,4]{2,1,0}, f32[5,6,10]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %q = f32[6,4]{1,0} get-tuple-element(%s), index=1
  %v = f32[5,10,4]{2,1,0} get-tuple-element(%s), index=2
  %all = f32[5,6,10]{2,1,0} get-tuple-element(%s), index=3
  %scores = f32[6,10]{1,0} fusion(%q, %v, %n), kind=kOutput, calls=%product
  %kept = f32[5,6,10]{2,1,0} fusion(%all, %scores, %n), kind=kLoop, calls=%keep
  ROOT %t = (s32[], f32[6,4]{1,0}, f32[5,10,4]{2,1,0}, f32[5,6,10]{2,1,0}) tuple(%n, %q, %v, %kept)
}

%condition (s: (s32[], f32[6,4], f32[5,10,4], f32[5,6,10])) -> pred[] {
  %s = (s32[], f32[6,4]{1,0}, f32[5,10,4]{2,1,0}, f32[5,6,10]{2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (s: (s32[], f32[6,4], f32[5,10,4], f32[5,6,10])) -> (s32[], f32[6,4], f32[5,10,4], f32[5,6,10]) {
  %s = (s32[], f32[6,4]{1,0}, f32[5,10,4]{2,1,0}, f32[5,6,10]{2,1,0}) parameter(0)
  ROOT %w = (s32[], f32[6,4]{1,0}, f32[5,10,4]{2,1,0}, f32[5,6,10]{2,1,0}) while(%s), condition=%condition, """ + (
    'body=%body, backend_config={"known_trip_count":{"n":"5"}}\n}\n'
)
INDEX, QUERIES, CELL, SCORES = 4, 6 * 4 * 4, 10 * 4 * 4, 6 * 10 * 4


def test_a_loop_reads_a_part_each_time_and_changes_in_place() -> None:
    each = (INDEX + QUERIES + CELL + SCORES) + (SCORES + INDEX + SCORES)
    assert traffic(parse_hlo(PARTS)) == 5 * each


def test_values_kept_on_the_chip_count_nothing() -> None:
    on_chip = PARTS.replace("%scores = f32[6,10]{1,0} fusion", "%scores = f32[6,10]{1,0:T(8,128)S(1)} fusion")
    assert on_chip != PARTS
    assert traffic(parse_hlo(on_chip)) == 5 * ((INDEX + QUERIES + CELL) + (INDEX + SCORES))


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("f32[8]{0} sort(%p), dimensions={0}, to_apply=%less", 64),
        ("f32[2]{0} slice(%p), slice={[0:2]}", 16),
        ("f32[4,2]{1,0} bitcast(%p)", 0),
        ("(f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%p)", 32),
        ('(f32[3,3]{1,0}, s8[4194304]{0}) custom-call(%p), custom_call_target="__cublas$lt$matmul"', 32 + 36),
        (
            'f32[9]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", '
            'metadata={op_name="jit(f)/while/body/maxima_flops_77_bytes_123/pallas_call"}',
            123,
        ),
        ("f32[32]{0} all-gather(%p), replica_groups=[1,4]<=[4]", 0),
    ],
)
def test_an_instruction_counts_operands_and_results(line: str, moved: int) -> None:
    parameter = "%p = f32[8]{0} parameter(0)"
    text = f"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {parameter}\n  ROOT %r = {line}\n}}\n"
    assert traffic(parse_hlo(text)) == moved


SIDE = 64
ARRAY = SIDE * SIDE * 4


def compiled(program: Callable[..., Any], *numbers: float) -> float | None:
    """Return the traffic of a program on some numbers and an array, compiled for this machine."""
    executable = jax.jit(program).lower(*numbers, jnp.ones((SIDE, SIDE))).compile()
    return traffic(parse_hlo(executable.as_text() or ""))


def ordered(x: jax.Array) -> jax.Array:
    """Read an array and write one."""
    return jnp.sort(x, axis=0)


def test_a_loop_with_unknown_iterations_has_unknown_traffic() -> None:
    def until(most: float, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0, 0] < most, ordered, x)

    def counted(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 7, lambda _, x: ordered(x), x)

    assert compiled(until, 3.0) is None
    moved = compiled(counted)  # control: a loop with the same body and a known count
    assert moved is not None
    assert moved >= 7 * 2 * ARRAY


def test_the_condition_of_a_loop_counts_too() -> None:
    """The condition runs once more than the body of the loop."""
    comparison = "%n = s32[] get-tuple-element(%s), index=0\n  ROOT %less = pred[] compare(%n, %n), direction=EQ"
    asking = PARTS.replace("ROOT %less = pred[] constant(true)", comparison)
    before = traffic(parse_hlo(PARTS))
    assert before is not None
    assert traffic(parse_hlo(asking)) == before + 6 * (INDEX + INDEX + 1)


@pytest.mark.parametrize("branches", [2, 3])
def test_a_conditional_counts_its_most_expensive_branch(branches: int) -> None:
    def twice(x: jax.Array) -> jax.Array:
        return ordered(ordered(x) * 2)

    def choose(which: int, x: jax.Array) -> jax.Array:
        return jax.lax.switch(which, [ordered, twice, ordered][:branches], x)

    alone, moved = compiled(twice), compiled(choose, 1)
    assert alone is not None
    assert moved is not None
    assert 4 * ARRAY <= alone <= moved < alone + 1000  # the branch's index adds a few bytes


def test_branches_for_true_and_false() -> None:
    text = """HloModule m

%one (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} negate(%p)
}

%none (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

ENTRY %main (p: f32[8], b: pred[]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %b = pred[] parameter(1)
  ROOT %r = f32[8]{0} conditional(%b, %p, %p), true_computation=%none, false_computation=%one
}
"""
    assert traffic(parse_hlo(text)) == 64


def test_shared_values_are_visited_once() -> None:
    """Forty times -x + exp(x): there are too many paths from the operand to the result to visit them all."""
    lines = ["  %a0 = f32[8]{0} parameter(0)"]
    for i in range(40):
        lines += [
            f"  %b{i} = f32[8]{{0}} negate(%a{i})",
            f"  %c{i} = f32[8]{{0}} exponential(%a{i})",
            f"  {'ROOT ' if i == 39 else ''}%a{i + 1} = f32[8]{{0}} add(%b{i}, %c{i})",
        ]
    fused = "\n".join(["%fused (a0: f32[8]) -> f32[8] {", *lines, "}"])
    text = f"""HloModule m

{fused}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%fused
}}
"""
    assert traffic(parse_hlo(text)) == 2 * 8 * 4
