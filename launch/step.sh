#!/usr/bin/env bash
# One step of a job, in one of its processes: launch/step.sh train|encode|search [more flags of that script]
#
#   DATA, WORKDIR  a folder of data in any format (or a set's name) and the run's folder; every host sees both under the
#                  same path. Relative paths start at the caller's folder
#   CONFIG         the config; configs/mlr.py by default
#   PLATFORM       tpu, gpu or cpu; the step fails if the machine has none
#   COORDINATOR    "auto" (TPU pods, srun), or host:port of process 0 with NUM_PROCESSES and PROCESS_ID; "": one process
#   TIMEOUT        seconds that processes wait for each other at the start; 300 by default
#   CHECKPOINT_EVERY  steps between checkpoints; 0: one checkpoint per epoch
#   PYTHON         the interpreter; by default that of the active environment (venv or conda), or else of .venv in the
#                  repository
#   DRY_RUN=1      only prints the command
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" # the comment at the top of this file
    exit
fi
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage="launch/step.sh train|encode|search [flags]"
if [[ $# == 0 ]]; then
    echo "usage: $usage" >&2
    exit 1
fi
step=$1
shift
: "${DATA:?a folder of data}" "${WORKDIR:?the folder of the run}" "${PLATFORM:?tpu, gpu or cpu}"

if [[ -z ${COORDINATOR:-} && -n ${NUM_PROCESSES:-}${PROCESS_ID:-} ]]; then # otherwise, each process would be a separate job
    echo "error: NUM_PROCESSES or PROCESS_ID is set, but no COORDINATOR: host:port of process 0" >&2
    exit 1
fi
several=("coordinator=${COORDINATOR:-}")
if [[ -n ${COORDINATOR:-} && $COORDINATOR != auto ]]; then
    several+=("num_processes=${NUM_PROCESSES:?of the job}" "process_id=${PROCESS_ID:?of this process, from 0}")
fi
several+=("initialization_timeout=${TIMEOUT:-300}")

case $step in
    train)
        flags=("--config=${CONFIG:-configs/mlr.py}" "--config.data.train=$DATA" "--config.mesh.platform=$PLATFORM"
            "--config.train.checkpoint_every=${CHECKPOINT_EVERY:-0}" "${several[@]/#/--config.mesh.}") ;;
    encode) flags=("--corpus=$DATA" "--platform=$PLATFORM" "${several[@]/#/--}") ;;
    search) flags=("--queries=$DATA" "--qrels=$DATA" "--k=100" "--platform=$PLATFORM" "${several[@]/#/--}") ;;
    *)
        echo "error: there is no step '$step': $usage" >&2
        exit 1 ;;
esac
if [[ -z ${PYTHON:-} ]]; then
    for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$repository/.venv"; do
        if [[ -n $environment && -x $environment/bin/python ]]; then
            PYTHON=$environment/bin/python
            break
        fi
    done
fi
if [[ -z ${PYTHON:-} ]]; then
    echo "error: no environment is active, and $repository has no .venv; activate one, or set PYTHON to its python" >&2
    exit 1
fi
command=("$PYTHON" "$repository/$step.py" "--workdir=$WORKDIR" "${flags[@]}" "$@")
if [[ -n ${DRY_RUN:-} ]]; then
    printf '%s\n' "${command[*]@Q}" # in one write, because several processes may print
else
    exec "${command[@]}" # replaces the shell, which would not pass SIGTERM on
fi
