#!/bin/sh
# Prints the path of a Python 3.12 or newer, or says what is missing and ends with 1.
works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

for version in 3.12 3.13 3.14; do
    for candidate in \
        "$(command -v "python$version" 2>/dev/null)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3 \
        "$HOME"/.local/share/uv/python/cpython-"$version"*/bin/python3; do
        if [ -x "$candidate" ] && works "$candidate"; then
            echo "$candidate"
            exit 0
        fi
    done
done
if works python3; then
    command -v python3
    exit 0
fi
echo "jaxpaged needs Python 3.12 or newer with venv; found $(python3 --version 2>&1 || echo none)." >&2
echo "Looked on PATH, in ~/.pyenv/versions and in uv's folder. Install one (for example" >&2
echo "'pyenv install 3.12' or 'apt-get install python3.12-venv') and run make again." >&2
exit 1
