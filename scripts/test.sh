#!/usr/bin/env bash
# Linter and tests, in an environment of exactly the versions in scripts/constraints.txt.
#
#   bash scripts/test.sh [arguments for pytest, such as tests/test_tasks.py or -k mask]
#
# PYTHON, MINBERT_VENV  the interpreter and where the environment lies; see scripts/environment.sh
# MINBERT_TEST_WORKERS  how many tests run at a time (default 2)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment test

say "Linter: ruff check"
"$venv/bin/ruff" check . || fail "ruff found faults (above). '$venv/bin/ruff check --fix' mends most of them."
say "Layout: ruff format --check"
"$venv/bin/ruff" format --check . || fail "some files are not formatted (above). '$venv/bin/ruff format' does it."

# One thread per worker: torch would give each worker every core, and they would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The tokenizers library warns, and then goes serial anyway, when a test forks after using it.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
say "Tests: pytest"
# A file stays with one worker, so that what its tests share (a trained toy model) is made once. The order is that of
# tests/conftest.py, and not by numbers of tests, which are many where each is short.
exec "$venv/bin/python" -m pytest -n "${MINBERT_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
