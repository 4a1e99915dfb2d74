#!/bin/sh
# Creates .venv with the pinned requirements and lesson_code itself. `sh tools/venv.sh [PYTHON]`
set -eu

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

if [ -n "${1:-}" ]; then
    suits "$1" || { echo "PYTHON=$1 is not a Python 3.11, 3.12 or 3.13: name one that is."; exit 1; }
    python=$1
else
    for python in python3 python3.13 python3.12 python3.11 python ""; do
        if [ -n "$python" ] && suits "$python"; then break; fi
    done
fi
if [ -z "$python" ]; then
    echo "Python 3.11, 3.12 or 3.13 is needed and none is on the PATH: install one, or name it with PYTHON=/path/to/python3.12."
    exit 1
fi

if ! .venv/bin/python -c '' 2>/dev/null; then
    rm -rf .venv
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        rm -rf .venv
        echo "$python cannot create a virtual environment: install its venv module (on Debian and Ubuntu: apt install python3-venv)."
        exit 1
    fi
fi

# The chapter on CUDA kernels compiles them for the CPU. Where there is no C++ compiler, pip brings one.
compiler=ziglang==0.17.1
for name in ${CXX:-c++ g++ clang++}; do
    if command -v "$name" >/dev/null; then compiler=; fi
done

# --no-compile: Python compiles what is imported, when it is; all of it would take a minute.
echo "Installing the requirements into .venv (about 0.6 GB to download where torch is a CPU build; once only) ..."
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt $compiler -e .; then
    echo "pip could not install the requirements (its message stands above): check the network connection and the free disk space, then run the command again."
    exit 1
fi
touch .venv/ready
