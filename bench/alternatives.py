"""Compare code that is written for speed with its plain form: python bench/alternatives.py [--only=gelu,top_k]

  gelu      GELU by erf, and jax.nn.gelu (by erfc): value and gradient of [2048,1536]
  gradient  gradient of a kernel with the smaller operand on the left, and as written: [2048,384] and [2048,1536]
  layers    BERT-base for one query of 8 tokens, from `split_layers`, and in a loop over the stack
  best      the 100 best of [64,65536] scores by maxima of groups, and by jax.lax.top_k
  barrier   one column of the 100 best, with barriers behind jax.lax.top_k, and without

Prints milliseconds, the fastest of several rounds, in which the two forms take turns. The device is JAX's default.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxret.models.encoders.architectures.bert import Bert, BertConfig
from jaxret.models.encoders.attention import gelu
from jaxret.models.encoders.layers import product
from jaxret.models.encoders.stack import split_layers
from jaxret.search.backends.top_k import best, highest
from jaxret.types import Tokens

Form = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def gelu_forms() -> dict[str, Form]:
    def gradient(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
        return jax.value_and_grad(lambda x: jnp.sum(function(x)))

    x = normal(2048, 1536)
    return {"erf": (gradient(gelu), (x,)), "erfc": (gradient(partial(jax.nn.gelu, approximate=False)), (x,))}


def gradient_forms() -> dict[str, Form]:
    def gradient(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda kernel, x, weights: jnp.sum(multiply(x, kernel) * weights))

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.einsum("ai,io->ao", x, kernel, precision=jax.lax.Precision.HIGHEST)

    def small_first(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return product("ai,io->ao", x, kernel, jnp.float32, jnp.float32)

    arguments = normal(1536, 384), normal(2048, 1536), normal(2048, 384)
    return {"small first": (gradient(small_first), arguments), "as written": (gradient(plain), arguments)}


def layers_forms() -> dict[str, Form]:
    config = BertConfig(1000, 768, 12, 12, 3072, max_positions=512)
    tokens = Tokens(jnp.ones((1, 8), jnp.int32), jnp.ones((1, 8), bool))
    params = jax.jit(Bert(config).init)(jax.random.key(0), tokens)["params"]

    def encode(params: Any) -> Any:
        return Bert(config).apply({"params": params}, tokens)

    return {"split": (encode, (split_layers(params),)), "loop": (encode, (params,))}


def best_forms() -> dict[str, Form]:
    scores = normal(64, 65536)
    return {"groups": (lambda x: best(x, 100)[:2], (scores,)), "top_k": (lambda x: jax.lax.top_k(x, 100), (scores,))}


def barrier_forms() -> dict[str, Form]:
    scores = normal(64, 65536)
    return {
        "barriers": (lambda x: highest(x, 100)[0][:, -1], (scores,)),
        "none": (lambda x: jax.lax.top_k(x, 100)[0][:, -1], (scores,)),
    }


COMPARISONS = {
    "gelu": gelu_forms,
    "gradient": gradient_forms,
    "layers": layers_forms,
    "best": best_forms,
    "barrier": barrier_forms,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.only.split(","):
        programs = {form: (jax.jit(function), inputs) for form, (function, inputs) in COMPARISONS[name]().items()}
        fastest = dict.fromkeys(programs, float("inf"))
        for _ in range(arguments.rounds + 1):  # the first round compiles
            for form, (program, inputs) in programs.items():
                begin = time.perf_counter()
                jax.block_until_ready(program(*inputs))
                fastest[form] = min(fastest[form], time.perf_counter() - begin)
        print(f"{name:9}{', '.join(f'{form} {1000 * value:.2f} ms' for form, value in fastest.items())}", flush=True)


if __name__ == "__main__":
    main()
