#!/usr/bin/env bash
# The tests start redis-server processes of their own. Installs it on Debian and Ubuntu if there is
# none; elsewhere says what is missing.
set -euo pipefail

if command -v redis-server >/dev/null; then exit 0; fi

fail() {
    printf 'error: the tests need redis-server, %s\n' "$1" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "and there is no apt-get to install it with: install Redis 6.2 or later"
as_root=()
if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || fail "and only root can install it: apt-get install redis-server"
    as_root=(sudo)
fi
echo "installing redis-server for the tests"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --no-install-recommends redis-server >>"$log" 2>&1
}
# the lists of a fresh machine are empty or old
install || { "${as_root[@]}" apt-get update >>"$log" 2>&1 && install; } || {
    tail -n 5 "$log" >&2
    fail "which apt-get could not install"
}
