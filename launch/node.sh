#!/usr/bin/env bash
# One machine with GPUs: a single process uses all of them. launch/step.sh lists the variables.
#
#   DATA=/data/msmarco WORKDIR=runs/mlr launch/node.sh [more flags of jaxret train]
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" # the comment at the top of this file
    exit
fi
export PLATFORM=${PLATFORM:-gpu} COORDINATOR=
step=$(dirname "${BASH_SOURCE[0]}")/step.sh

"$step" train "$@"
"$step" encode
"$step" search
