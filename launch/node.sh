#!/usr/bin/env bash
# One machine with GPUs: a single process uses all of them. launch/step.sh says what can be set.
#
#   DATA=/data/msmarco WORKDIR=runs/mlr launch/node.sh [more flags of train.py]
set -euo pipefail
export PLATFORM=${PLATFORM:-gpu} COORDINATOR=
step=$(dirname "${BASH_SOURCE[0]}")/step.sh

"$step" train "$@"
"$step" encode
"$step" search
