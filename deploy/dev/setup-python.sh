#!/usr/bin/env bash
# Create a virtual environment with uv in it. Usage: setup-python.sh PYTHON VENV LIST (uv's version and its hashes)
# On a bare Debian or Ubuntu the venv module is a separate package; as root this script installs it.
set -euo pipefail
python=${1:-} venv=$2 list=$3

say() { printf '==> %s\n' "$*"; }
may_install() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }

if [ -z "$python" ] || ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  may_install || {
    echo "Python 3.11 or newer with its venv module is needed: install python3 and python3-venv, then try again." >&2
    exit 1
  }
  say "system packages: python3, python3-venv"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates >/dev/null
  python=$(command -v python3)
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Python 3.11 or newer is needed, $python is $("$python" -V): set PYTHON=/path/to/python3.11." >&2
  exit 1
}
say "virtual environment in $venv ($("$python" -V))"
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$list"
