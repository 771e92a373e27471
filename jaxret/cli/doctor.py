"""Checks whether this machine can do the work: packages, devices, search backends, kernels, memory and disks.

jaxret doctor
jaxret doctor --workdir=runs/mlr --coordinator=10.0.0.2:1234
jaxret doctor --config=mlr --config.train.batch_size=32     training with a config on the devices here
jaxret doctor --bucket=gs://BUCKET/FOLDER                   rights in a bucket

With --config, or with the --workdir of a run, the training step is compiled for these devices, and its memory is
compared with theirs. Every problem is printed with its remedy. The exit status is 1 if a check fails.
"""

from absl import flags

from jaxret.cli import shared_flags

_CONFIG = shared_flags.optional_config("config to check training with; default: config of the run in --workdir")
_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a run, or of a future one; default: the current folder")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "check that the host of HOST:PORT, a job's first process, is known"
)
_BUCKET = flags.DEFINE_string("bucket", "", "check that jobs can write to gs://BUCKET/FOLDER or s3://BUCKET/FOLDER")


def main() -> None:
    import sys

    from jaxret.experiments.doctor import report_check
    from jaxret.experiments.doctor_job import checks_of_request

    checks = []
    for check in checks_of_request(_CONFIG.value, _WORKDIR.value, _COORDINATOR.value, _BUCKET.value):
        checks.append(check)
        report_check(check)
    if any(check.fatal for check in checks):
        sys.exit(1)
