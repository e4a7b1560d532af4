#!/usr/bin/env bash
# Try every supported pair of a Python and a torch: tests/matrix.sh [PYTHON/TORCH ...], for example 3.13/2.14.1
#
# Each pair gets a virtual environment that is deleted afterwards, with torch from pip's index (gigabytes each), and runs
# the tests of worker, state, sharded states, programs, core and link, one test with real workers, and the quickstart from the wheel alone. A
# table is printed at the end. A pair whose Python is not on this machine is skipped with a line. Exits with 1 if a pair
# fails, with 2 if none could be tried.
set -uo pipefail
cd "$(dirname "$0")/.."

supported=()
for python in 3.11 3.12 3.13; do
    for torch in 2.11.0 2.13.0 2.14.1 2.15.0; do supported+=("$python/$torch"); done
done
tests=(tests/worker tests/state tests/sharded tests/programs tests/core tests/transport "tests/process/test_lost_workers.py::test_two_die_at_once"
    "tests/docs/test_package.py::test_it_runs_with_what_it_declares")

interpreter() { # of version $1: on the PATH, or the newest of pyenv's
    command -v "python$1" && "python$1" -c "" 2> /dev/null && return
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python | sort -V | tail -n 1
}

try() { # the Python $1 with the torch $2, in the folder $3
    "$1" -m venv "$3/venv" || return
    local bin="$3/venv/bin"
    grep -v '^torch==' tests/constraints.txt > "$3/constraints.txt"
    "$bin/python" -m pip install -q -c "$3/constraints.txt" -e '.[demo]' "torch==$2" \
        build hatchling hypothesis nbval pytest pytest-timeout || return
    "$bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}"
}

work=$(mktemp -d "${TMPDIR:-/tmp}/matrix.XXXXXX")
trap 'rm -rf "$work"' EXIT
table=() tried=0 failed=0
for pair in "${@:-${supported[@]}}"; do
    found=$(interpreter "${pair%/*}" | tail -n 1)
    if ! [ -x "$found" ]; then
        echo "skipped: Python ${pair%/*} is not on this machine"
        table+=("$pair  skipped: no such Python here")
        continue
    fi
    tried=$((tried + 1))
    mkdir "$work/$tried"
    if try "$found" "${pair#*/}" "$work/$tried" 2>&1 | tee "$work/log"; then result=passed; else result=FAILED failed=1; fi
    # torch's libraries may print after pytest
    table+=("$pair  $result: $(grep -aE '[0-9]+ (passed|failed|error)' "$work/log" || tail -n 1 "$work/log")")
    rm -rf "${work:?}/$tried"
done
printf '\n%s\n' "python/torch"
printf '%s\n' "${table[@]}"
[ "$tried" -gt 0 ] || exit 2
exit "$failed"
