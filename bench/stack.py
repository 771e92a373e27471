"""Compare `encoders.stack.Stack` with a plain scan: python bench/stack.py [--layers=12 --hidden=768]

Computes the value and gradient of a function of [CLS] after BERT layers, in three ways with the same parameters:
  stack    Stack
  nn.scan  flax.linen.scan over all layers; the last one computes every position
  slices   lax.scan over the parameters of all layers but the last, which computes only [CLS]
Prints seconds to compile, temporary memory of the program (without parameters and their gradient), and the fastest of
several runs. The device is JAX's default.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxret.models.encoders.architectures.bert import Bert, BertConfig, BertLayer
from jaxret.models.encoders.layers import RECOMPUTE, Compute
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import Stack
from jaxret.types import Tokens

SELECTION = Selection(1, layers="last")


def variants(config: BertConfig, compute: Compute) -> dict[str, Callable[[Any, jax.Array, TokenLayout], jax.Array]]:
    """Return functions (parameters, embeddings, layout) -> states [B,1,H]."""
    names, fields = RECOMPUTE[compute.recompute], (config, compute, SELECTION)
    policy = None if names is None else jax.checkpoint_policies.save_only_these_names(*names)

    def recomputed(function: Any, wrap: Any) -> Any:
        return function if names is None else wrap(function, prevent_cse=False, policy=policy)

    def stack(params: Any, hidden: jax.Array, layout: TokenLayout) -> jax.Array:
        layers = Stack(partial(BertLayer, *fields), config.num_layers, compute, name="layers")
        return layers.apply({"params": params}, hidden, layout, first=1)[0]

    def flax_scan(params: Any, hidden: jax.Array, layout: TokenLayout) -> jax.Array:
        layers = nn.scan(
            recomputed(BertLayer, nn.remat),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=config.num_layers,
        )
        return layers(*fields).apply({"params": params}, hidden, layout)[0][:, :1]

    def slices(params: Any, hidden: jax.Array, layout: TokenLayout) -> jax.Array:
        layer = BertLayer(*fields)

        def apply(hidden: jax.Array, row: Any) -> tuple[jax.Array, None]:
            return layer.apply({"params": row}, hidden, layout)

        below = jax.tree.map(lambda leaf: leaf[:-1], params)
        hidden, _ = jax.lax.scan(recomputed(apply, jax.checkpoint), hidden, below)
        return layer.apply({"params": jax.tree.map(lambda leaf: leaf[-1], params)}, hidden, layout, first=1)[0]

    return {"stack": stack, "nn.scan": flax_scan, "slices": slices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--recompute", default="cheap", choices=RECOMPUTE)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    hidden = arguments.hidden
    config = BertConfig(1000, hidden, arguments.layers, hidden // 64 or 1, 4 * hidden, max_positions=512)
    shape = arguments.texts, arguments.length
    tokens = Tokens(jnp.ones(shape, jnp.int32), jnp.ones(shape, bool))
    params = jax.jit(Bert(config).init)(jax.random.key(0), tokens)["params"]
    embedded = Bert(config).apply({"params": params}, tokens, False, method="embed")
    layout, layers = TokenLayout.of(tokens), params["layers"]
    compiled, gradients = {}, {}
    for name, function in variants(config, Compute(recompute=arguments.recompute)).items():

        def loss(layers: Any, embedded: jax.Array, function: Any = function) -> jax.Array:
            return jnp.sum(jnp.sin(function(layers, embedded, layout)))

        begin = time.perf_counter()
        compiled[name] = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(layers, embedded).compile()
        seconds = time.perf_counter() - begin
        memory = compiled[name].memory_analysis().temp_size_in_bytes / 2**20  # type: ignore[union-attr]
        gradients[name] = jax.device_get(compiled[name](layers, embedded))
        print(f"{name:8} compiled in {seconds:.1f} s, temporary memory {memory:.0f} MiB", flush=True)
    for name in ("nn.scan", "slices"):
        differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), gradients[name], gradients["stack"])
        print(f"{name:8} largest difference of value and gradients {max(jax.tree.leaves(differences)):.1e}")
    fastest = dict.fromkeys(compiled, float("inf"))
    for _ in range(arguments.rounds):
        for name, program in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(layers, embedded))
            fastest[name] = min(fastest[name], time.perf_counter() - begin)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) / 2**20
    print(f"seconds: {', '.join(f'{name} {value:.3f}' for name, value in fastest.items())}; parameters {size:.0f} MiB")


if __name__ == "__main__":
    main()
