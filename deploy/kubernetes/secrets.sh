#!/usr/bin/env bash
# Makes the Secrets that the manifests name, each with a random value; those that exist stay as they
# are. Values go through pipes: no command line shows them.
#
#   cachesmith-redis       password      of both Redis servers
#   cachesmith-ray-token   auth_token    what Ray asks for
#   cachesmith-api         admin_token   http.admin_token
set -euo pipefail

namespace=${1:-cachesmith}

make_secret() {
    if kubectl --namespace "$namespace" get secret "$1" >/dev/null 2>&1; then
        echo "$1 is there"
        return
    fi
    openssl rand -hex 32 | tr -d '\n' |
        kubectl --namespace "$namespace" create secret generic "$1" --from-file="$2=/dev/stdin"
}

make_secret cachesmith-redis password
make_secret cachesmith-ray-token auth_token
make_secret cachesmith-api admin_token
