#!/usr/bin/env bash
# Create .venv in the repository's folder with a recent Python, and install into it: launch/environment.sh FILE
#
#   FILE  requirements-tpu.txt, requirements-gpu.txt or requirements.txt
#
# The image of Cloud TPU VMs (tpu-ubuntu2204-base) has Python 3.10 and no venv, so uv installs Python 3.12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! -f ${1:-} ]]; then
    echo "usage: launch/environment.sh requirements-tpu.txt|requirements-gpu.txt|requirements.txt" >&2
    exit 1
fi

make_environment() {
    local python
    for python in python3.14 python3.13 python3.12 python3.11 python3; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$python" -m venv .venv
            return
        fi
    done
    python3 -m pip install --user uv
    python3 -m uv venv --seed --python 3.12 .venv
}
[[ -x .venv/bin/python ]] || make_environment
.venv/bin/python -m pip install -r "$1"
