"""Kernels of attention, compiled for chips that are absent: they compile to machine code, and use little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from jaxret.parallel.chips import parse_topology
from jaxret.plan.compilation import ENVIRONMENT, missing_compiler
from tests.pipeline import REPOSITORY, environment

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxret.models.encoders.attention import attend
from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.window import FAR, WindowMask
from jaxret.parallel.chips import parse_topology

name, attention, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
description = parse_topology(name).description()
if "chips_per_host_bounds" in description:
    description["chips_per_host_bounds"] = tuple(description["chips_per_host_bounds"])
place = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(**description).devices[0])

def temporaries(attention, length, heads, width, dtype, rate, kv_heads=None, windows=()):
    # windows: how far before and after it a token attends in the layers of a scan; none: everywhere.
    choices = tuple(tuple(FAR if bound is None else bound for bound in window) for window in windows)

    def loss(query, key, value, mask, random):
        def of_layer(total, near):
            near_mask = WindowMask(mask, jnp.arange(length), *near, choices)
            mixed = attend(query, key, value, near_mask, drop, compute=compute)
            return total + jnp.sum(mixed.astype(jnp.float32) ** 2), None

        layout = TokenLayout(mask, jnp.arange(len(query)))
        drop = Dropout(rate, layout).bind({}, rngs={"dropout": jax.random.wrap_key_data(random)})
        compute = Compute(jnp.dtype(dtype), attention=attention)
        if choices:
            return jax.lax.scan(of_layer, jnp.float32(0), jnp.asarray(choices))[0]
        return jnp.sum(attend(query, key, value, mask, drop, compute=compute).astype(jnp.float32) ** 2)

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    texts = 16 if length <= 512 else 8192 // length
    of_queries, of_keys = (array(texts, length, count, width) for count in (heads, kv_heads or heads))
    arguments = of_queries, of_keys, of_keys, array(texts, length, dtype="bool"), array(2, dtype="uint32")
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes

print(json.dumps([[temporaries(kind, *case) for kind in ("plain", attention)] for case in cases]))
"""
SHAPES = [(512, 12, 64, "bfloat16", 0.1), (256, 12, 32, "bfloat16", 0.0), (40, 16, 64, "float32", 0.1)]
CAUSAL, WINDOWS = [(None, 0)], [(511, 0), (None, 0)]
# Heads that share keys: Qwen3-8B, Llama-3.2-1B, and layers with windows between other layers.
DECODERS = [
    (512, 32, 128, "bfloat16", 0.0, 8, CAUSAL),
    (2048, 32, 128, "bfloat16", 0.0, 8, CAUSAL),
    (2048, 32, 64, "bfloat16", 0.0, 8, CAUSAL),
    (2048, 16, 128, "bfloat16", 0.0, 4, WINDOWS),
]
GEMMA = [(2048, 4, 256, "bfloat16", 0.0, 1, WINDOWS)]


def temporaries(chips: str, attention: str, cases: list[tuple[Any, ...]]) -> list[list[int]]:
    """Return the bytes of temporaries of plain attention and of the kernel, for each case (length, heads, width, type,
    dropout, heads of keys, windows)."""
    if problem := missing_compiler(parse_topology(chips)):
        pytest.skip(problem)
    arguments = [sys.executable, "-c", PROGRAM, chips, attention, json.dumps(cases)]
    variables = {**environment(), **ENVIRONMENT, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    done = subprocess.run(arguments, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    if "cuDNN not found" in done.stderr:
        pytest.skip("cuDNN is not installed: pip install -r requirements-plan.txt, in a separate environment")
    assert done.returncode == 0, done.stderr[-2000:]
    values = json.loads(done.stdout.splitlines()[-1])
    for case, pair in zip(cases, values, strict=True):  # docs/scale.md has these lines, printed by pytest -s
        print(chips, *case[:4], *(f"{size / 2**20:,.0f} MiB" for size in pair))
    return values


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("chips", "most"),
    [("v4:1x1x1", 2**20), ("v5e:1x1", 2**20), ("v6e:1x1", 2**20), ("v5p:1x1x1", 25 * 2**20)],  # v5p copies its operands
)
def test_flash_compiles_and_keeps_no_weights(chips: str, most: int) -> None:
    (plain, kernel), *_ = temporaries(chips, "flash", SHAPES if chips == "v5e:1x1" else SHAPES[:1])
    assert plain > 200 * 2**20  # the weights of 16 texts and 12 heads take 192 MiB in float32
    assert kernel < most


@pytest.mark.exhaustive
@pytest.mark.parametrize("chips", ["v5e:1x1", "v6e:1x1"])
def test_flash_compiles_for_decoders(chips: str) -> None:
    cases = DECODERS + GEMMA
    for (length, heads, *_), (plain, kernel) in zip(cases, temporaries(chips, "flash", cases), strict=True):
        assert plain > 8192 * heads * length * 2, "plain attention holds the weights of 8,192 tokens in bfloat16"
        assert kernel < plain / 8


@pytest.mark.exhaustive
def test_cudnn_compiles_for_decoders() -> None:
    for (length, heads, *_), (plain, kernel) in zip(DECODERS, temporaries("h100:1", "cudnn", DECODERS), strict=True):
        assert plain > 8192 * heads * length * 2, "plain attention holds the weights of 8,192 tokens in bfloat16"
        assert kernel < plain / 8, "the kernel needs only a workspace of XLA and cuDNN"


@pytest.mark.exhaustive
@pytest.mark.parametrize("chips", ["h100:1", "h200:1"])
def test_cudnn_compiles_and_keeps_no_weights(chips: str) -> None:
    ((plain, kernel),) = temporaries(chips, "cudnn", [(512, 12, 64, "bfloat16", 0.0)])
    assert plain > 100 * 2**20
    assert kernel < 40 * 2**20, "the kernel needs only a workspace of XLA and cuDNN"
