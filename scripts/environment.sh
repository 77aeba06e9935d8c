# Sourced by quickstart.sh and test.sh, which so share one environment of exact versions.
#
# PYTHON            the interpreter to build it with (default: the first of python3, python3.13, 3.12 and 3.11 that
#                   will do)
# MINBERT_VENV      where it lies (default .venv in the repository)
# MINBERT_VERSIONS  which versions: newest (default), those of constraints.txt, or lowest, of constraints-lowest.txt.
#                   A change empties the environment and fills it anew; to keep both, give each its MINBERT_VENV.
#
# Sets root, python, venv, stamp and constraints, and goes to the repository's folder. Written for bash 3.2 too, which
# macOS has.

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

# make_environment EXTRA: brings the environment about or finds it there. EXTRA is plain, or test (which will do for
# plain as well). Says what it does, and ends the script with a sentence if it fails.
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
    if _wants_cpu_torch; then
        say "No NVIDIA GPU here: taking torch's CPU build from $cpu_index, which is a tenth of the other"
        pip+=(--extra-index-url "$cpu_index")
    fi
    say "Installing the package '$package' and what it needs (minutes where it has to be downloaded)"
    echo unfinished >"$stamp"
    # With setuptools pinned and present, building the package fetches nothing that the constraints do not name.
    "${pip[@]}" setuptools || fail "pip could not install setuptools: its message is above. Is there a network?"
    "${pip[@]}" --no-build-isolation --editable "$package" ||
        fail "pip could not install the versions of $constraints: its message is above."
    # Without what is compiled each start takes seconds more. The libraries' own tests are left out, and some files are
    # for other versions of Python, which is no failure.
    "$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/' "$venv/lib" || true
}

# On Linux, PyPI's torch is the one with CUDA, several GB. Where PyTorch's own index is out of reach it has to do.
_wants_cpu_torch() {
    [[ $(uname -s) == Linux && -z ${PIP_EXTRA_INDEX_URL:-} ]] && ! command -v nvidia-smi >/dev/null &&
        "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
            "$cpu_index/torch/" 2>/dev/null
}
