"""Trains, encodes, searches and evaluates on documentation of Python, in minutes on two cores:

jaxret demo --workdir=runs/demo
"""

from absl import flags

WRITES = ("workdir",)
_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "folder for all results")


def main() -> None:
    from jaxret.demo.demo import demo
    from jaxret.parallel.memory import keep_freed_memory

    keep_freed_memory()
    demo(_WORKDIR.value)
