"""A process reuses the memory that it freed, without requesting pages from the system again."""

import subprocess
import sys

import pytest

# Print in how many of 100 runs of a program with 64 MiB of temporaries the system provides their pages again.
PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from jaxret.parallel.memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit("refused")
program = jax.jit(lambda x: jnp.sin(jnp.outer(x, x)) @ x)
x = jnp.ones(4096)
handed = []
for _ in range(100):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
    handed.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(pages > 24 for pages in handed))  # 64 MiB are 32 pages of 2 MiB, or 16,384 of 4 KiB
"""


def runs_with_new_pages(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True)
    if run.stderr.strip() == "refused":
        pytest.skip("this C library always returns large blocks to the system")
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.exhaustive
def test_freed_memory_is_kept_by_the_process() -> None:
    """Except in the first runs, until the heap has grown enough."""
    assert runs_with_new_pages("kept") <= 50
    assert runs_with_new_pages("given back") == 100, "control: a process that gives memory back needs new pages"
