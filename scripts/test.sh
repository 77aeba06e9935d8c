#!/usr/bin/env bash
# Linter, type checker and tests, in an environment of exactly the versions in scripts/constraints.txt.
#
#   bash scripts/test.sh [--arithmetic FORM] [arguments for pytest, such as tests/test_tasks.py or -k mask]
#
# FORM says by which kernels a CPU computes, as other processors would:
#   native    whatever the libraries choose on this one (default)
#   avx2      those for AVX2, which AVX-512 hides. MKL chooses by alignment and each worker has two threads; the tests
#             write weights at odd multiples of 4 bytes in their files. So equality is tested where it holds least.
#   portable  torch's without vectors, oneDNN's for SSE4.1 and MKL's for any x86, on one thread: roundings that are
#             neither those of AVX2 nor of AVX-512. The nearest to another architecture that an x86 can do.
#
# PYTHON, MINBERT_VENV  the interpreter and where the environment lies; see scripts/environment.sh
# MINBERT_VERSIONS      newest (default) or lowest, those of scripts/constraints-lowest.txt
# MINBERT_TEST_WORKERS  how many tests run at a time (default 2)
set -euo pipefail

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
# The libraries read these as they are loaded.
case $arithmetic in
native) ;;
avx2)
    unset MKL_CBWR
    export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MINBERT_TEST_MISALIGNED=1
    export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE # threads that wait leave the core to the other worker's
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
if [[ ${MINBERT_VERSIONS:-newest} == newest ]]; then # the annotations of libraries differ from version to version
    say "Types: ty check"
    "$venv/bin/ty" check --python "$venv" hf_minbert || fail "ty found types that do not fit (above)."
fi

# One thread per worker: torch would give each worker every core, and they would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The tokenizers library warns, and then goes serial anyway, when a test forks after using it.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
say "Tests: pytest, arithmetic: $arithmetic"
# A file stays with one worker, so that what its tests share (a trained toy model) is made once. The order is that of
# tests/conftest.py, and not by numbers of tests, which are many where each is short.
exec "$venv/bin/python" -m pytest -n "${MINBERT_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
