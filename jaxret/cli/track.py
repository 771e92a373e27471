"""Sends the metrics of a run to experiment trackers, after training:

jaxret track runs/mlr --to=trackio
jaxret track runs/mlr --to=wandb,mlflow --project=retrieval

A tracker gets the config, the environment, every line of metrics.jsonl and the means of all evaluations. Each line is
sent once, by this command or during training (train.trackers). A tracker must be installed.
"""

from absl import flags

ARGUMENTS = {"RUN": "folder of a run"}

_TO = flags.DEFINE_list("to", [], "trackers: trackio, wandb, mlflow")
_PROJECT = flags.DEFINE_string(
    "project", "", "project at the trackers (mlflow: experiment); default: train.tracker_project of the run"
)


def main(run: str) -> None:
    from jaxret.experiments.track_run import track_run
    from jaxret.parallel.events import emit

    for name, counts in track_run(run, _TO.value, _PROJECT.value).items():
        emit("tracker", run=run, name=name, lines=counts.lines, evaluations=counts.evaluations)
        print(f"{name}: sent {counts.lines:,} lines of metrics and {counts.evaluations} evaluation(s) of {run}")
