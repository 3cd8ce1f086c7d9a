#!/bin/bash
# Process 1 of a test host, in namespaces of its own.
#   host_init.sh STATE_DIR NAME ADDRESS KEEP...
# STATE_DIR has the host's files, `../shared` what all hosts have in common. KEEP are folders below
# $HOME or /tmp that the host must see as they are outside; all else there is the host's own.
set -euo pipefail
state=$1 name=$2 address=$3
shift 3

mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size=4g tmpfs /dev/shm
mkdir -p /run/sshd
for own in "$HOME" /tmp; do
    mkdir -p "$state/files$own"
    for kept in "$@"; do
        [[ $kept/ == "$own"/* ]] || continue
        mkdir -p "$state/files$kept"
        mount --bind "$kept" "$state/files$kept"
    done
    mount --rbind "$state/files$own" "$own"
done
chmod 1777 /tmp
mount --bind "$state/../shared/resolv.conf" /etc/resolv.conf
printf '127.0.0.1 localhost\n%s %s\n' "$address" "$name" >"$state/hosts"
mount --bind "$state/hosts" /etc/hosts
hostname "$name"

/usr/sbin/sshd -D -e -f "$state/sshd_config" 2>>"$state/sshd.log" </dev/null &
touch "$state/ready"
# orphans of the whole host become children of this shell, which must reap them
while true; do wait -n || sleep 0.5; done
