#!/usr/bin/env bash
# What `cachesmith testbed` needs beside Python. Installs it on Debian and Ubuntu where it is
# missing; elsewhere says what is. No service is started.
set -euo pipefail

declare -A packages=([ip]=iproute2 [ssh]=openssh-client [sshd]=openssh-server [rsync]=rsync
    [redis-server]=redis-server [setpriv]=util-linux)
missing=()
for program in "${!packages[@]}"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
if ((${#missing[@]} == 0)); then exit 0; fi

fail() {
    printf 'error: the testbed needs %s, %s\n' "${missing[*]}" "$1" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "and there is no apt-get to install them with"
[[ $(id -u) == 0 ]] || fail "and only root can install them"
echo "installing ${missing[*]} for the testbed"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    # RUNLEVEL: as at shutdown, so that a new sshd is not started on this machine
    env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install --yes --no-install-recommends "${missing[@]}" >>"$log" 2>&1
}
# the lists of a fresh machine are empty or old
install || { apt-get update >>"$log" 2>&1 && install; } || {
    tail -n 5 "$log" >&2
    fail "which apt-get could not install"
}
