#!/usr/bin/env bash
# Linter, type checker and tests, in an environment of exactly the versions in scripts/constraints.txt.
#
#   bash scripts/test.sh [--arithmetic FORM] [arguments for pytest, such as tests/test_tasks.py or -k mask]
#
# The first call makes the environment, which takes 5 to 15 minutes. Each call checks the whole repository with the
# linter and the type checker, and then runs the tests.
#
# FORM chooses the kernels by which the CPU computes, to test the arithmetic of other processors:
#   native    the libraries' choice for this processor (default)
#   avx2      kernels for AVX2, also if the processor has AVX-512. MKL chooses by alignment, and each worker has two
#             threads. The tests write weights at odd multiples of 4 bytes in their files. Results that should be equal
#             then differ most easily.
#   portable  torch without vector instructions, oneDNN for SSE4.1 and MKL for any x86, on one thread. The roundings
#             differ from those of AVX2 and AVX-512. On an x86, this comes nearest to another architecture.
#
# PYTHON, MINBERT_VENV  the Python and the folder of the environment; see scripts/environment.sh
# MINBERT_VERSIONS      newest (default), or lowest for the versions of scripts/constraints-lowest.txt
# MINBERT_TEST_WORKERS  how many tests run at the same time (default 2)
set -euo pipefail

case ${1:-} in
-h | --help) # the comment above
    sed -n '2,/^set /{/^#/!d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit
    ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

arithmetic=native
case ${1:-} in
--arithmetic)
    arithmetic=${2:-}
    shift $(($# < 2 ? $# : 2))
    ;;
--arithmetic=*)
    arithmetic=${1#*=}
    shift
    ;;
esac
# The libraries read these variables when they are loaded.
case $arithmetic in
native) ;;
avx2)
    unset MKL_CBWR
    export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MINBERT_TEST_MISALIGNED=1
    export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE # waiting threads leave the core to the other worker
    ;;
portable)
    export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1
    ;;
*) fail "--arithmetic must be native, avx2 or portable. Found '$arithmetic'." ;;
esac

make_environment test

say "Linter: ruff check"
"$venv/bin/ruff" check . || fail "ruff found faults (above). '$venv/bin/ruff check --fix' fixes most of them."
say "Layout: ruff format --check"
"$venv/bin/ruff" format --check . || fail "some files are not formatted (above). '$venv/bin/ruff format' does it."
if [[ ${MINBERT_VERSIONS:-newest} == newest ]]; then # type annotations of libraries differ between versions
    say "Types: ty check"
    "$venv/bin/ty" check --python "$venv" hf_minbert || fail "ty found types that do not fit (above)."
fi

# One thread per worker: torch would give each worker every core, and they would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# If a test forks after using the tokenizers library, the library warns and works serially.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
say "Tests: pytest, arithmetic: $arithmetic"
# All tests of a file run in one worker, so that what they share, such as a trained toy model, is made once. The order
# of files is that of tests/conftest.py: files with slow tests first.
exec "$venv/bin/python" -m pytest -n "${MINBERT_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
