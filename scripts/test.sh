#!/usr/bin/env bash
# Linter and tests, in an environment of exactly the versions in scripts/constraints.txt.
#
#   bash scripts/test.sh [arguments for pytest, such as tests/test_tasks.py or -k mask]
#
# PYTHON                the interpreter to build the environment with (default python3; 3.11 or newer)
# MINBERT_VENV          where the environment lies (default .venv in the repository)
# MINBERT_TEST_WORKERS  how many tests run at a time (default 2)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
venv=${MINBERT_VENV:-$root/.venv}
# A relative path means the caller's folder, so it is resolved before the cd.
[[ $venv == /* ]] || venv=$PWD/$venv
stamp=$venv/minbert-stamp
cd "$root"

say() { printf '== %s\n' "$*"; }
fail() {
    printf 'test.sh: %s\n' "$*" >&2
    exit 1
}

# What the environment depends on. The editable install points at this checkout, hence the path in it.
fingerprint() { "$python" -c '
import hashlib, pathlib, sys
parts = [sys.version.encode(), pathlib.Path.cwd().as_posix().encode()]
parts += [pathlib.Path(name).read_bytes() for name in ("scripts/constraints.txt", "setup.py")]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())'; }

build_environment() {
    # Only a folder that this script made is emptied: MINBERT_VENV may name somebody's own environment by mistake.
    if [[ -e $venv && ! -e $stamp ]]; then
        fail "$venv exists and was not made by this script. Remove it or set MINBERT_VENV to another folder."
    fi
    say "Making the environment $venv with $("$python" --version) (about a minute, then kept)"
    mkdir -p "$venv" && echo unfinished >"$stamp"
    rm -rf "${venv:?}"/{bin,lib,lib64,include,share,pyvenv.cfg}
    "$python" -m venv "$venv" || fail "$python -m venv failed. On Debian and Ubuntu the package python3-venv is needed."

    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt)
    # With setuptools pinned and present, building the package fetches nothing that the constraints do not name.
    "${pip[@]}" setuptools || fail "pip could not install setuptools: its message is above. Is there a network?"
    "${pip[@]}" --no-build-isolation --editable ".[test]" ||
        fail "pip could not install the versions of scripts/constraints.txt: its message is above."
    fingerprint >"$stamp"
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "needs Python 3.11 or newer, which the versions in scripts/constraints.txt ask for; '$python' is none." \
        "Set PYTHON to one, for example PYTHON=python3.12 bash scripts/test.sh."

if [[ -e $stamp && $(<"$stamp") == "$(fingerprint)" ]]; then
    say "Using the environment $venv (its versions are those of scripts/constraints.txt)"
else
    build_environment
fi

say "Linter: ruff check"
"$venv/bin/ruff" check . || fail "ruff found faults (above). '$venv/bin/ruff check --fix' mends most of them."
say "Layout: ruff format --check"
"$venv/bin/ruff" format --check . || fail "some files are not formatted (above). '$venv/bin/ruff format' does it."

# One thread per worker: torch would give each worker every core, and they would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The tokenizers library warns, and then goes serial anyway, when a test forks after using it.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
say "Tests: pytest"
# A file stays with one worker, so that what its tests share (a trained toy model) is made once.
exec "$venv/bin/python" -m pytest -n "${MINBERT_TEST_WORKERS:-2}" --dist loadfile "$@"
