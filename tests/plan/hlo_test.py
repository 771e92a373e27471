"""The parser of XLA's dumps, on two small programs. One was compiled for four v5e chips: a scan over three layers of
[128,128], rows split over all chips, and the gradient of a loss that needs every row. The other was compiled for an
H100."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxret.plan import hlo
from jaxret.plan.compilation import REMATERIALIZATION, allocated_memory, failure_reason, partition_warning, read_dump

EXCERPTS = Path(__file__).with_name("excerpts")
PROGRAM = (EXCERPTS / "tpu_after_optimizations.txt").read_text()
GPU = (EXCERPTS / "gpu_after_optimizations.txt").read_text()
BUFFERS = (EXCERPTS / "tpu_buffer_assignment.txt").read_text()
ROWS, ALL_ROWS, SIZE, LAYERS = 16, 64, 128, 3


def test_collectives_in_a_loop_count_per_iteration() -> None:
    gather, reduce = sorted(hlo.collectives(hlo.parse_hlo(PROGRAM), 4), key=lambda c: c.kind)
    assert (gather.kind, gather.dtypes, gather.times, gather.group) == ("all-gather", ("bf16",), 1, 4)
    assert gather.bytes == ALL_ROWS * SIZE * 2
    assert gather.sent == gather.bytes * 3 / 4
    assert (reduce.kind, reduce.dtypes, reduce.times, reduce.group) == ("all-reduce", ("f32",), LAYERS, 4)
    assert reduce.bytes == SIZE * SIZE * 4
    assert reduce.sent == 2 * reduce.bytes * 3 / 4
    assert "while/body" in reduce.name


def test_products_equal_the_formula() -> None:
    layer = 2 * ROWS * SIZE * SIZE
    loss = 2 * ALL_ROWS * ALL_ROWS * SIZE
    # The program computes gradients of the loss, not its value.
    assert hlo.hlo_product_flops(hlo.parse_hlo(PROGRAM)) == LAYERS * 3 * layer + 2 * loss


def test_products_of_a_gpu_are_calls_of_a_library() -> None:
    """The program has three layers on [4,32,128], for one H100: products of every text's states with each other, of
    these with the states, and a product with [128,128]."""
    texts, tokens, size = 4, 32, 128
    attention = 2 * 2 * texts * tokens * tokens * size
    layers = 3 * (attention + 2 * texts * tokens * size * size)
    assert hlo.hlo_product_flops(hlo.parse_hlo(GPU)) == layers
    other = GPU.replace("__cublas$", "another$")
    assert other != GPU
    assert hlo.hlo_product_flops(hlo.parse_hlo(other)) == 0
    unknown = GPU.replace("known_trip_count", "something").replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="how often the loop while"):
        hlo.parse_hlo(unknown)
    hlo.parse_hlo(unknown.replace("__cublas$", "another$"))


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (
            'bf16[4,256,768]{2,1,0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config='
            '{"custom_call_config": {"cost_estimate": {"transcendentals": "0", "flops": "123"}}}',
            123,
        ),
        (
            '(bf16[4,12,256,64]{3,1,2,0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax", '
            'backend_config={"cudnn_fmha_backend_config": {"algorithm": {"tuning_knobs": {"17": "1"}}, '
            '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["4", "12", "256", "128"]}}}',
            2 * 2 * 4 * 12 * 256 * 128 * 64,
        ),
        (
            'f32[4]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", '
            'metadata={op_name="jit(f)/maxima_flops_77_bytes_123/pallas_call"}',
            77,
        ),
        ('f32[4]{0} custom-call(%p), custom_call_target="AllocateBuffer"', 0),
    ],
)
def test_flops_of_a_kernel_are_read(call: str, flops: int) -> None:
    text = f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n  ROOT %r = {call}\n}}\n"
    assert hlo.hlo_product_flops(hlo.parse_hlo(text)) == flops
    if "Softmax" in call:
        backward = text.replace("fmhaSoftmax", "fmhaSoftmaxBackward")
        assert hlo.hlo_product_flops(hlo.parse_hlo(backward)) == 2 * flops


def test_memory_by_argument_adds_up() -> None:
    sizes = allocated_memory(BUFFERS, hlo.parse_hlo(PROGRAM))
    weights = LAYERS * SIZE * SIZE * 4
    assert sizes["parameters"] == sizes["moments"] == weights
    assert sizes["inputs"] == ROWS * SIZE * 4
    assert sum(sizes.values()) == 572_928  # XLA reports for main memory: "Total bytes: 572928 (559.5KiB)"


@pytest.mark.parametrize(
    ("rest", "group"),
    [
        ("replica_groups=mesh['axis_0'=16,'axis_1'=4,'axis_2'=1] {'axis_0'}, to_apply=%add", 16),
        ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_0','axis_1'}, to_apply=%add", 64),
        ("replica_groups=[4,2]<=[8], to_apply=%add", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add", 4),
        ("replica_groups={{0,1,2},{3,4,5}}, to_apply=%add", 3),
        ("replica_groups={}, to_apply=%add", 6),
    ],
)
def test_a_group_is_read_in_every_form(rest: str, group: int) -> None:
    text = f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n  ROOT %r = f32[2]{{0}} all-reduce(%p), {rest}\n}}\n"
    (parsed,) = hlo.collectives(hlo.parse_hlo(text), 6)
    assert parsed.group == group


def collective(line: str) -> hlo.Collective:
    (parsed,) = hlo.collectives(
        hlo.parse_hlo(f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n  {line}\n}}\n"), 4
    )
    return parsed


def test_started_collectives_count_their_results() -> None:
    gather = collective("%g = (bf16[2,3]{1,0}, bf16[8,3]{1,0}) all-gather-start(%p), replica_groups=[1,4]<=[4]")
    assert (gather.kind, gather.bytes, gather.sent) == ("all-gather", 48, 36)
    scatter = collective("%s = f32[2,3]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%add")
    assert (scatter.bytes, scatter.sent) == (24, 72)
    several = collective("%a = (f32[5]{0}, bf16[5]{0}) all-reduce(%p, %q), replica_groups=[1,4]<=[4], to_apply=%add")
    assert (several.bytes, several.dtypes) == (30, ("bf16", "f32"))


def test_an_asynchronous_gather_counts_once() -> None:
    line = 'all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], frontend_attributes={chain_id="0"}'
    text = (
        f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[8] {{\n  %a = f32[8]{{0}} {line}\n  %b = f32[8]{{0}} {line}\n"
    )
    assert len(hlo.collectives(hlo.parse_hlo(text + "}\n"), 4)) == 1
    other = text.replace("channel_id=7", "channel_id=8", 1)
    assert len(hlo.collectives(hlo.parse_hlo(other + "}\n"), 4)) == 2


DOT = "%d = f32[2,2]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
START = "%s = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), channel_id=1, replica_groups=[1,4]<=[4]"
DONE = "%e = f32[8]{0} all-gather-done(%s)"
FUSION = "%f = f32[8]{0} fusion(%p), kind=kOutput, calls=%NAME"


@pytest.mark.parametrize(
    ("lines", "called", "inner", "overlapped"),
    [
        ((START, DOT, DONE), "", (), True),
        ((DOT, START, DONE), "", (), False),
        ((START, DONE, DOT), "", (), False),
        ((START, FUSION, DONE), "fused_computation", (DOT,), True),
        ((START, FUSION, DONE), "fused_computation", (), False),
        # On TPUs, a fusion that runs during a collective also contains it.
        ((FUSION,), "async_collective_fusion.1", (START.replace("-start", ""), DOT), True),
        ((FUSION,), "async_collective_fusion.1", (START.replace("-start", ""),), False),
        ((START.replace("-start", ""), DOT), "", (), False),
    ],
)
def test_a_collective_is_overlapped_by_products_of_its_schedule(
    lines: tuple[str, ...], called: str, inner: tuple[str, ...], overlapped: bool
) -> None:
    def computation(opening: str, lines: tuple[str, ...]) -> str:
        return "".join([opening, *(f"  {line}\n" for line in ("%p = f32[2,2]{1,0} parameter(0)", *lines)), "}\n"])

    text = "HloModule m\n\n" + (computation(f"%{called} (p: f32[2,2]) -> f32[8] {{\n", inner) if called else "")
    text += computation("ENTRY %main (p: f32[2,2]) -> f32[8] {\n", lines).replace("%NAME", f"%{called}")
    (collective,) = hlo.collectives(hlo.parse_hlo(text), 4)
    assert collective.overlapped == overlapped


def test_an_overlapped_gather_counts_per_start() -> None:
    gather = 'f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], metadata={op_name="a"}'
    text = f"""HloModule m

%body (p: (s32[])) -> (s32[]) {{
  %again = {gather}
}}

%condition (p: (s32[])) -> pred[] {{
  %p = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: f32[2]) -> f32[8] {{
  %begin = {gather}
  %loop = (s32[]) while(%state), condition=%condition, body=%body
  %end = {gather}
}}
"""
    (gathered,) = hlo.collectives(hlo.parse_hlo(text), 4)
    assert gathered.times == 1
    (inside,) = hlo.collectives(
        hlo.parse_hlo(text.replace(f"%begin = {gather}", "").replace(f"%end = {gather}", "")), 4
    )
    assert inside.times == 12


@pytest.mark.parametrize(
    ("product", "left", "right", "flops"),
    [
        ("f32[4,6]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "4,5", "5,6", 2 * 4 * 5 * 6),
        (
            "f32[3,4,6]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_batch_dims={0}",
            "3,4,5,7",
            "3,5,7,6",
            2 * 3 * 4 * 6 * 35,
        ),
        ("f32[4,6]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", "4,5", "5,6", 2 * 4 * 5 * 6),
        # A TPU's form of the product of batched matrices, [2,8,16,4] x [2,8,16,4] -> [2,8,16,16], without a sum over a
        # window.
        (
            "f32[2,8,16,16]{3,2,1,0} convolution(%a, %b), window={size=2x8 stride=1x7 lhs_dilate=2x8}, "
            "dim_labels=01bf_01oi->01bf",
            "2,8,16,4",
            "2,8,16,4",
            2 * 2 * 8 * 16 * 16 * 4,
        ),
        # The gradient of a kernel, [3,16,6] x [3,16,7] -> [6,7], summed over both 3 (a window) and 16.
        (
            "f32[6,7]{1,0} convolution(%a, %b), window={size=3}, dim_labels=0fb_0io->bf0",
            "3,16,6",
            "3,16,7",
            2 * 6 * 7 * 3 * 16,
        ),
    ],
)
def test_flops_of_products(product: str, left: str, right: str, flops: int) -> None:
    if product.startswith("f32[6,7]"):
        product = product.replace("f32[6,7]{1,0}", "f32[6,7,1]{2,1,0}")
    lines = f"  %a = f32[{left}]{{0}} parameter(0)\n  %b = f32[{right}]{{0}} parameter(1)\n  ROOT %c = {product}\n"
    assert (
        hlo.hlo_product_flops(hlo.parse_hlo(f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n{lines}}}\n"))
        == flops
    )


@pytest.mark.parametrize("branches", [2, 3])
def test_products_of_all_branches_count(branches: int) -> None:
    def program(which: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.switch(which, [lambda x: x @ x, lambda x: x + 1, lambda x: x @ x @ x][:branches], x)

    text = jax.jit(program).lower(jnp.int32(0), jnp.ones((32, 32))).compile().as_text()
    assert "conditional(" in str(text)
    assert hlo.hlo_product_flops(hlo.parse_hlo(str(text))) == {2: 1, 3: 3}[branches] * 2 * 32**3


def test_a_loop_of_unknown_length_is_an_error() -> None:
    """It is no error if the loop has nothing that is counted."""
    harmless = re.sub(r"(convolution|dot|all-reduce|all-gather)\(", "add(", PROGRAM)
    assert not hlo.collectives(hlo.parse_hlo(harmless.replace("direction=LT", "direction=NE")), 4)
    unknown = PROGRAM.replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="how often the loop while"):
        hlo.parse_hlo(unknown)
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse_hlo("nothing")


def test_a_dump_is_read_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    for name, text in (("after_optimizations.txt", PROGRAM), ("after_optimizations-buffer-assignment.txt", BUFFERS)):
        (tmp_path / "dump" / f"module_0003.jit_step.{name}").write_text(text)
        (tmp_path / "dump" / f"module_0001.jit_convert.{name}").write_text("HloModule small\n")
    warning = f"[SPMD] {REMATERIALIZATION.capitalize()}. for op: %x = f32[8]"
    line = f'W1122 05:11:09 spmd.cc:1] {warning}, metadata={{op_name="jit(f)/y"}}'
    compiled = read_dump(tmp_path, 4, f"other\n{line}\n{line}\n")
    assert compiled.warnings == (f"{REMATERIALIZATION} at jit(f)/y",)
    assert partition_warning(f"  {REMATERIALIZATION}: no name ") == f"{REMATERIALIZATION}: no name"
    assert compiled.total == 572_928
    assert compiled.bytes_moved == ALL_ROWS * SIZE * 2 + LAYERS * SIZE * SIZE * 4


def test_compiler_messages_are_one_line() -> None:
    log = """Traceback (most recent call last):
  File "child.py", line 3, in main
jax.errors.JaxRuntimeError: INVALID_ARGUMENT: Topology layout "v5e:3x3" is not divisible by "2x2x1"
--------------------
For simplicity, JAX has removed its internal frames.
"""
    assert failure_reason(log) == 'INVALID_ARGUMENT: Topology layout "v5e:3x3" is not divisible by "2x2x1"'
    assert failure_reason("killed") == "the compiler ended without an error message ('killed')"
