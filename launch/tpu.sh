#!/usr/bin/env bash
# A Cloud TPU pod slice, from your own machine: launch/tpu.sh install|train|encode|search [more flags of that script]
#
#   TPU, ZONE      name and zone of the slice
#   SOURCE         the address from which its hosts clone the repository
#   DATA, WORKDIR  a folder of data in any format (or a set's name) and the run's folder: in a bucket (gs://BUCKET/FOLDER),
#                  or on a disk that all hosts have mounted under the same path
#   CONFIG, CHECKPOINT_EVERY, TIMEOUT  as for launch/step.sh
#   DRY_RUN=1      only prints the command
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" # the comment at the top of this file
    exit
fi
if [[ $# == 0 ]]; then
    echo "usage: launch/tpu.sh install|train|encode|search [flags]" >&2
    exit 1
fi
action=$1
shift

on_all() { # on_all COMMAND
    local command=(gcloud compute tpus tpu-vm ssh "${TPU:?its name}" "--zone=${ZONE:?its zone}" --worker=all "--command=$1")
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q ' "${command[@]}"
        echo
    else
        "${command[@]}"
    fi
}

if [[ $action == install ]]; then
    on_all "git clone ${SOURCE:?address of the repository} jaxret && cd jaxret && launch/environment.sh requirements-tpu.txt"
    exit
fi
: "${DATA:?a folder of data}" "${WORKDIR:?the folder of the run}"
if [[ $WORKDIR != /* && $WORKDIR != gs://?* && $WORKDIR != s3://?* ]]; then # otherwise, each host would have a separate run
    echo "error: WORKDIR is '$WORKDIR'; give gs://BUCKET/FOLDER, or the absolute path of a folder that all hosts have mounted" >&2
    exit 1
fi
settings=(DATA="$DATA" WORKDIR="$WORKDIR" CONFIG="${CONFIG:-configs/mlr.py}"
    CHECKPOINT_EVERY="${CHECKPOINT_EVERY:-500}" TIMEOUT="${TIMEOUT:-300}" PLATFORM="${PLATFORM:-tpu}" COORDINATOR=auto)
on_all "cd jaxret && $(printf '%q ' env "${settings[@]}" launch/step.sh "$action" "$@")"
