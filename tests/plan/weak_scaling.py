"""Print the table of weak scaling in docs/scale.md: python -m tests.plan.weak_scaling [--topologies=v5e:1x1,v5e:2x2]

The batch grows with the chips: 8 queries and 16 passages for each. A step sends the gradients once, whatever the number
of chips, and gathers all vectors. The efficiency assumes that products run at the full rate, and that a step waits for
the bytes which XLA's schedule does not send during products.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import jax

from jaxret.configs import load_config
from jaxret.parallel.chips import parse_topology
from jaxret.plan.advice import with_changes
from jaxret.plan.compilation import require_compiler
from jaxret.plan.planner import Planner
from tests.plan.watched_programs import CHEAP, COMMON, log

TOPOLOGIES = "v5e:1x1,v5e:2x2,v5e:4x4,v5e:8x8,v5e:16x16"
QUERIES = 8  # queries per chip


def scaling_row(name: str, devices: int, values: dict[str, Any]) -> str:
    """Return the table's line for a plan."""
    bound, moved = values["lower_bound"], values["sent_bytes"] / 1e6
    waits = bound["links"] * (1 - values["overlapped"])
    efficiency = bound["arithmetic"] / (bound["arithmetic"] + waits)
    return (
        f"| {name} | {devices * QUERIES:,} | {values['memory']['total'] / 2**30:.2f} GiB | {moved:,.0f} MB | "
        f"{bound['arithmetic'] * 1e3:.1f} ms | {bound['links'] * 1e3:.1f} ms | {values['overlapped']:.0%} | "
        f"{efficiency:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default=TOPOLOGIES)
    topologies = [parse_topology(text) for text in parser.parse_args().topologies.split(",")]
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", max(topology.devices for topology in topologies))
    print("| chips | queries | memory of a device | bytes sent | products | communication | overlapped | efficiency |")
    print("|:--|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for topology in topologies:
        require_compiler(topology)
        changes = COMMON | CHEAP | {"train.batch_size": QUERIES * topology.devices}
        planner = Planner("train", with_changes(load_config("base"), changes), "base", log, advice=False)
        print(scaling_row(str(topology), topology.devices, planner.on(topology)), flush=True)


if __name__ == "__main__":
    main()
