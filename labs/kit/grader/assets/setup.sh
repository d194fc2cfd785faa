#!/usr/bin/env bash
# Once, when the image is made: a Python that is new enough, the course's packages, and bubblewrap.
set -euo pipefail
root="${AUTOGRADER:-/autograder}"
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

apt-get update
apt-get install -y --no-install-recommends bubblewrap python3 python3-venv

python=""
find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            python="$name"
            return
        fi
    done
}
find_python
if [ -z "$python" ]; then
    apt-get install -y --no-install-recommends python3.12 python3.12-venv \
        || apt-get install -y --no-install-recommends python3.11 python3.11-venv
    find_python
fi
if [ -z "$python" ]; then
    echo "the course needs Python 3.11 or newer: choose a newer Ubuntu as base image" >&2
    exit 1
fi

"$python" -m venv "$root/venv"
# The CPU build of PyTorch is several GB smaller.
"$root/venv/bin/python" -m pip install --extra-index-url https://download.pytorch.org/whl/cpu \
    --editable "$root/source/course[grade]" --constraint "$root/source/course/constraints.txt"
