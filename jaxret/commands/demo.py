"""Trains, encodes, searches and evaluates on the documentation of the Python that runs it, in minutes on two cores:

jaxret demo --workdir=runs/demo
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "where everything is saved")


def main() -> None:
    from jaxret.demo.demo import demo
    from jaxret.memory import keep_freed_memory

    keep_freed_memory()
    demo(_WORKDIR.value)
