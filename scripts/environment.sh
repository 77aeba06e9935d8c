# quickstart.sh and test.sh source this file. They share one environment with exact versions.
#
# PYTHON            the Python to build it with (default: the first of python3, python3.13, python3.12 and python3.11
#                   that is new enough)
# MINBERT_VENV      the folder of the environment (default .venv in the repository)
# MINBERT_VERSIONS  newest (default), the versions of constraints.txt, or lowest, those of constraints-lowest.txt. If
#                   this changes, the environment is emptied and filled again. To keep both, give each its own folder.
#
# Sets root, python, venv, stamp and constraints, and changes to the repository's folder. It also runs in bash 3.2, the
# version of macOS.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MINBERT_VENV:-$root/.venv}
# A relative path means the caller's folder, so it is resolved before the cd.
[[ $venv == /* ]] || venv=$PWD/$venv
stamp=$venv/minbert-stamp
cpu_index=https://download.pytorch.org/whl/cpu
cd "$root"

say() { printf '== %s\n' "$*"; }
fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

case ${MINBERT_VERSIONS:-newest} in
newest) constraints=scripts/constraints.txt ;;
lowest) constraints=scripts/constraints-lowest.txt ;;
*) fail "MINBERT_VERSIONS must be newest or lowest. Found '$MINBERT_VERSIONS'." ;;
esac

choose_python() {
    local candidates=(python3 python3.13 python3.12 python3.11)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    done
    fail "needs Python 3.11 or newer, which the versions in $constraints ask for. Found none as" \
        "${candidates[*]}. Install one, or set PYTHON to one: PYTHON=/path/to/python3.12 bash scripts/${0##*/}"
}

# What the environment depends on. The editable install points at this checkout, hence the path in it.
fingerprint() { "$python" -c '
import hashlib, pathlib, sys
parts = [sys.version.encode(), pathlib.Path.cwd().as_posix().encode()]
parts += [pathlib.Path(name).read_bytes() for name in (sys.argv[1], "setup.py")]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())' "$constraints"; }

# make_environment EXTRA: makes the environment, or uses the existing one. EXTRA is plain or test. An environment for
# test is also used for plain. Says what it does, and ends the script with a message if it fails.
make_environment() {
    local wanted=$1 right there=none
    choose_python
    right=$(fingerprint)
    [[ ! -e $stamp ]] || there=$(<"$stamp")
    if [[ $there == "$right $wanted" || $there == "$right test" ]]; then
        say "Using the environment $venv (its versions are those of $constraints)"
        return
    fi
    if [[ $there != "$right plain" ]]; then
        _empty_environment
    fi
    _install "$wanted"
    echo "$right $wanted" >"$stamp"
}

_empty_environment() {
    # Only a folder that these scripts made is emptied: MINBERT_VENV may name somebody's own environment by mistake.
    if [[ -e $venv && ! -e $stamp ]]; then
        fail "$venv exists and was not made by this script. Remove it or set MINBERT_VENV to another folder."
    fi
    say "Making the environment $venv with $("$python" --version) and the versions of $constraints (once, then kept)"
    { mkdir -p "$venv" && echo unfinished >"$stamp"; } ||
        fail "$venv cannot be written. Set MINBERT_VENV to a folder that can."
    rm -rf "${venv:?}"/{bin,lib,lib64,include,share,pyvenv.cfg}
    "$python" -m venv "$venv" || fail "$python -m venv failed. On Debian and Ubuntu the package python3-venv is needed."
}

_install() {
    local package=. pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input)
    pip+=(--no-compile) # below, on all cores
    [[ $1 == plain ]] || package=".[$1]"
    pip+=(--constraint "$constraints")
    [[ -t 1 ]] || pip+=(-qq) # on a terminal its bars show how far a long download is
    if ! _wants_cpu_torch; then
        :
    elif ! _reaches_cpu_index; then
        say "No NVIDIA GPU here, and $cpu_index cannot be reached: pip takes the torch that it finds. PyPI's has CUDA and several GB"
    else
        say "No NVIDIA GPU here: taking torch's CPU build from $cpu_index, which has a tenth of the size of the CUDA build"
        pip+=(--extra-index-url "$cpu_index")
    fi
    say "Installing the package '$package' and its requirements. Downloads take minutes, and show no progress in a log"
    echo unfinished >"$stamp"
    # With setuptools pinned and present, building the package fetches nothing that the constraints do not name.
    "${pip[@]}" setuptools || fail "pip could not install setuptools: its message is above. Is there a network?"
    "${pip[@]}" --no-build-isolation --editable "$package" ||
        fail "pip could not install the versions of $constraints: its message is above."
    # Without compiled files, each start takes seconds more. The libraries' own tests are left out. Some files are for
    # other versions of Python, so a failure is ignored.
    "$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/' "$venv/lib" || true
}

# On Linux, PyPI's torch is the CUDA build.
_wants_cpu_torch() {
    [[ $(uname -s) == Linux && -z ${PIP_EXTRA_INDEX_URL:-} ]] && ! command -v nvidia-smi >/dev/null
}

_reaches_cpu_index() {
    "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$cpu_index/torch/" \
        2>/dev/null
}
