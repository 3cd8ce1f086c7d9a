#!/usr/bin/env bash
# Two Redis servers on the head of a Ray cluster, with a password of their own. `gcs` keeps Ray's
# state, so that Ray's control process can start again and find it: it must lose nothing. `kv` keeps
# chunks: it may lose any. One maxmemory-policy can not serve both. See --help.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/head_redis.sh [--address IP] [--kv-memory SIZE] [--gcs-port N] [--kv-port N] [--dir DIR]

  --address IP      where both listen, besides loopback (default: this machine's own address)
  --kv-memory SIZE  maxmemory of the chunks' Redis, as in redis.conf (default: 8gb)
  --gcs-port N      (default: 6380)
  --kv-port N       (default: 6381)
  --dir DIR         of the files below (default: ~/.cachesmith)

Installs redis-server where there is none, makes a password once, and starts both servers: through
systemd where it runs, else by themselves. Called again, it applies what has changed. It writes,
for their owner alone:

  DIR/redis_password
  DIR/head.env   for `ray start --head`: NODE_ADDRESS, RAY_REDIS_ADDRESS, REDIS_PASSWORD
  DIR/deploy.env for `cachesmith deploy`: CACHESMITH_KV_TIER__REDIS__URL, RAY_DASHBOARD_ADDRESS

A Redis of yours takes their place if you write the two .env files yourself.
END
}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# the address that the machine would use to go out, as Ray finds its own; no packet is sent
own_address() { ip -4 route get 8.8.8.8 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p' || true; }

address='' kv_memory=8gb gcs_port=6380 kv_port=6381 dir=~/.cachesmith
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --address | --kv-memory | --gcs-port | --kv-port | --dir)
            (($# > 1)) || fail "$1 needs a value"
            name=${1#--}
            printf -v "${name//-/_}" '%s' "$2"
            shift 2
            ;;
        *) usage >&2; exit 2 ;;
    esac
done
[[ -n $address ]] || address=$(own_address)
[[ -n $address ]] || fail "this machine's address was not found: name it with --address"

here=$(dirname "${BASH_SOURCE[0]}")
had_redis=1
command -v redis-server >/dev/null || { had_redis=0; "$here/redis_server.sh"; }

umask 077
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
if [[ ! -s $dir/redis_password ]]; then
    python3 -c 'import secrets; print(secrets.token_hex(32))' >"$dir/redis_password"
fi
password=$(<"$dir/redis_password")

as_root=()
[[ $(id -u) == 0 ]] || as_root=(sudo)
has_systemd=0
[[ ! -d /run/systemd/system ]] || has_systemd=1

# Usage: configuration PORT DATA_DIR, with the server's own lines on stdin
configuration() {
    local listen="127.0.0.1 $address"
    [[ $address != 127.0.0.1 ]] || listen=$address
    printf '%s\n' "bind $listen" "port $1" "dir $2" "requirepass $password"
    cat
}

# Usage: start NAME PORT, with the server's own lines on stdin
start() {
    local unit=cachesmith-$1 file data text
    if ((has_systemd)); then
        # the package's service may write below /var/lib/redis alone
        file=/etc/redis/redis-$unit.conf data=/var/lib/redis/$unit
        text=$(configuration "$2" "$data")
        if is_unchanged "$2" "$file" "$text"; then return; fi
        "${as_root[@]}" install -d -o redis -g redis -m 700 "$data"
        "${as_root[@]}" install -o redis -g redis -m 600 /dev/stdin "$file" <<<"$text"
        "${as_root[@]}" systemctl enable --quiet "redis-server@$unit"
        "${as_root[@]}" systemctl restart "redis-server@$unit"
    else
        file=$dir/$1.conf data=$dir/$1
        text=$(configuration "$2" "$data")
        text+=$'\n'"daemonize yes"$'\n'"pidfile $data.pid"$'\n'"logfile $data/redis.log"
        if is_unchanged "$2" "$file" "$text"; then return; fi
        stop "$data.pid"
        mkdir -p "$data"
        printf '%s\n' "$text" >"$file"
        redis-server "$file"
    fi
    for _ in $(seq 100); do
        if answers "$2"; then return; fi
        sleep 0.1
    done
    fail "the $1 Redis does not answer at $address:$2"
}

answers() {
    REDISCLI_AUTH=$password redis-cli -h "$address" -p "$1" ping 2>/dev/null | grep -q PONG
}

# A restart would lose all chunks, and Ray would miss its own server: only when it must be.
is_unchanged() { answers "$1" && [[ $("${as_root[@]}" cat "$2" 2>/dev/null) == "$3" ]]; }

# The server that an earlier call left here. Its pid may have become another program's.
stop() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    [[ $(cat "/proc/$pid/comm" 2>/dev/null) == redis-server ]] || return 0
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
}

# The package starts a server without a password at port 6379, which is the one that Ray takes.
if ((has_systemd && !had_redis)); then
    "${as_root[@]}" systemctl disable --now --quiet redis-server
fi

start gcs "$gcs_port" <<END
maxmemory 1gb
maxmemory-policy noeviction
appendonly yes
appendfsync everysec
END
start kv "$kv_port" <<END
maxmemory $kv_memory
maxmemory-policy allkeys-lru
appendonly no
save ""
END

cat >"$dir/head.env" <<END
export NODE_ADDRESS=$address
export RAY_REDIS_ADDRESS=$address:$gcs_port
export REDIS_PASSWORD=$password
END
cat >"$dir/deploy.env" <<END
export CACHESMITH_KV_TIER__REDIS__URL=redis://:$password@$address:$kv_port/0
export RAY_DASHBOARD_ADDRESS=http://$address:8265
END
echo "Redis listens at $address: Ray's state on $gcs_port, chunks on $kv_port ($kv_memory)"
