"""Replace srun and gcloud on this machine: start real processes, with the variables that JAX reads on a cluster.

$HOSTS is the number of hosts, $STEP_DRY_RUN their value of $DRY_RUN. Hosts of a Cloud TPU ask a server of Google for
their number, which does not exist here: they also get Slurm's variables.
"""

import os
import subprocess
import sys


def start(command: list[str], count: int, folder: str = ".") -> int:
    """Run this many processes to their end; return the highest status."""
    several = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"}
    several |= {"SLURM_NTASKS": str(count), "SLURM_STEP_NUM_NODES": str(count)}
    environment = os.environ | several | {"DRY_RUN": os.environ.get("STEP_DRY_RUN", "")}
    tasks = [
        subprocess.Popen(command, env=environment | {"SLURM_PROCID": str(rank)}, cwd=folder) for rank in range(count)
    ]
    return max(task.wait() for task in tasks)


def srun(arguments: list[str]) -> int:
    options = arguments[: arguments.index("launch/step.sh")]
    flags = dict(option.split("=") for option in options)
    assert flags.keys() <= {"--kill-on-bad-exit"}, flags
    return start(arguments[len(options) :], int(os.environ["HOSTS"]))


def gcloud(arguments: list[str]) -> int:
    name, *options = arguments[4:]
    flags = dict(option.split("=", 1) for option in options)
    assert (arguments[:4], name) == (["compute", "tpus", "tpu-vm", "ssh"], "slice")
    assert flags.keys() == {"--zone", "--worker", "--command"}, flags
    assert flags["--worker"] == "all"
    return start(["bash", "-c", flags["--command"]], int(os.environ["HOSTS"]), os.environ["HOME"])


if __name__ == "__main__":
    sys.exit({"srun": srun, "gcloud": gcloud}[sys.argv[1]](sys.argv[2:]))
