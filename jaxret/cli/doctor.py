"""Checks whether this machine can do the work: packages, devices, search backends, kernels, memory and disks.

jaxret doctor
jaxret doctor --workdir=runs/mlr --coordinator=10.0.0.2:1234

Every problem has its remedy. The exit status is 1 if something fails.
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a run, or of a future one; default: the current folder")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of a job's first process: whether its host is known")


def main() -> None:
    import sys

    from jaxret.experiments.doctor import checks_of_machine, report_check

    checks = []
    for check in checks_of_machine(_WORKDIR.value, _COORDINATOR.value):
        checks.append(check)
        report_check(check)
    if any(check.fatal for check in checks):
        sys.exit(1)
