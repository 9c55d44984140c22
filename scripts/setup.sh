# Sourced by ./quickstart and ./test from the repository root: makes .venv with the pinned libraries and zeroshard.
#
#   setup cli.txt              PYTHON is then the interpreter of the environment
#   setup_newest               instead: the newest release of each library, torch included, in .venv-newest
#   setup_oldest               the lower bounds of pyproject.toml, in .venv-oldest
#   setup_with "a==1 b==2"     the pinned libraries but for these releases, in an environment that is named after them
#
# torch comes first and alone, so that nothing else chooses its build. A stamp per requirements file makes the next call
# immediate; another stamp names the checkout whose source the environment imports, since two may share one environment.
# PYTHON=... chooses the interpreter, ZEROSHARD_VENV=... the place of the environment.

say() { if [ -t 2 ]; then printf '\033[1m%s\033[0m\n' "$*" >&2; else printf '%s\n' "$*" >&2; fi; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        is_recent "$PYTHON" || fail "PYTHON: expected Python 3.10 or later, got '$PYTHON'"
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$name" >/dev/null && is_recent "$name"; then
            echo "$name"
            return
        fi
    done
    fail "expected Python 3.10 or later in PATH, found none; install it, or name one with PYTHON=/path/to/python3"
}

make_venv() {
    local python=$1 venv=$2
    if "$python" -m venv "$venv" >/dev/null 2>&1; then return; fi
    fail "cannot create $venv: install Python's venv module (Debian, Ubuntu: apt install python3-venv)"
}

pip_install() { # shows that it lives: on a terminal pip's own lines and bars, elsewhere a line for each file that is fetched
    if [ -t 2 ]; then
        "$PYTHON" -m pip install --disable-pip-version-check "$@" >&2
    else
        "$PYTHON" -m pip install --disable-pip-version-check --progress-bar off "$@" |
            { grep --line-buffered -E '^ *(Downloading|Using cached|Building|Installing) ' >&2 || true; }
    fi || fail "pip install $* failed (its message is above)"
}

stamp_of() { # of a requirements file: everything that decides what gets installed
    cat requirements/{torch,cli,docs}.txt "requirements/$1" pyproject.toml scripts/setup.sh | cksum | tr ' ' '-'
}

open_venv() { # a place: PYTHON is then its interpreter; the environment is made if there is none
    local venv=$1 python
    if [ ! -x "$venv/bin/python" ] || ! is_recent "$venv/bin/python"; then
        python=$(find_python)
        say "creating $venv with $("$python" --version)"
        rm -rf "$venv"
        make_venv "$python" "$venv"
    fi
    PYTHON=$venv/bin/python
}

setup() {
    local requirements=$1 venv=${ZEROSHARD_VENV:-.venv} stamp checkout
    open_venv "$venv"
    stamp=$venv/.zeroshard-$requirements-$(stamp_of "$requirements")
    checkout=$venv/.zeroshard-checkout-$(pwd -P | cksum | tr ' ' '-')
    if [ ! -e "$stamp" ] || [ ! -e "$checkout" ]; then
        say "installing torch"
        pip_install -r requirements/torch.txt
        say "installing the libraries of requirements/$requirements"
        pip_install -r "requirements/$requirements"
        pip_install --no-deps --editable .
        rm -f "$venv/.zeroshard-$requirements-"* "$venv/.zeroshard-checkout-"*
        touch "$stamp" "$checkout"
    fi
}

setup_newest() {
    open_venv "${ZEROSHARD_VENV:-.venv-newest}"
    say "installing the newest release of each library"
    pip_install --upgrade torch
    pip_install --upgrade --upgrade-strategy eager --editable '.[test]'
}

lower_bounds() { # of pyproject.toml's libraries, as requirements of exactly these releases
    sed -n '/^\[project\]/,/^\[tool/p' pyproject.toml | grep -oE '"[a-z0-9-]+(\[[a-z]+\])?>=[0-9.]+' | sed -E 's/"//; s/\[[a-z]+\]//; s/>=/==/'
}

setup_oldest() {
    local bounds=${ZEROSHARD_VENV:-.venv-oldest}/lower-bounds.txt
    open_venv "$(dirname "$bounds")"
    lower_bounds >"$bounds"
    say "installing the oldest release of each library that pyproject.toml admits"
    pip_install "$(grep '^torch==' "$bounds")"
    pip_install --constraint "$bounds" --editable '.[test]'
}

setup_with() {
    ZEROSHARD_VENV=${ZEROSHARD_VENV:-.venv-with-$(printf %s "$1" | tr -cs 'A-Za-z0-9.' -)}
    setup test.txt
    say "installing $1"
    # shellcheck disable=SC2086  # the releases are words
    pip_install $1
}
