#!/usr/bin/env bash
# Everything that only a GPU can show, in one run of less than eight minutes, without a network.
#
#   benchmarks/device.sh               on a CUDA device
#   DEVICE=cpu benchmarks/device.sh    the same parts in toy shapes, to try the script itself
#
# PYTHON names the interpreter, OUT the folder of the results. All parts run, whatever the others
# did; the exit status is 1 if one failed. Needs torch, triton, transformers, NumPy, pytest, and for
# the parts that walk a model what kv_tier imports (blake3, xxhash).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
device=${DEVICE:-cuda}
out=${OUT:-benchmarks/results}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# part NAME SECONDS "MODULES IT NEEDS" COMMAND...
part() {
    local name=$1 limit=$2 needs=$3 status started=$SECONDS
    shift 3
    printf '\n== %s\n' "$name"
    if ! "$python" -c "import $needs" >"$logs/$name.log" 2>&1; then
        tail -n 1 "$logs/$name.log"
        status=missing
    else
        timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$logs/$name.log" | cut -c -200
        status=${PIPESTATUS[0]}
    fi
    printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - started))" >>"$logs/parts.tsv"
}

if [[ $device == cpu ]]; then
    tests=(tests/replicas/test_triton_kernels.py -m "not gpu" -k "any_strides or work_list or refused")
    exactness=(--device cpu --num-seeds 1)
    attention=(--device cpu --tokens 512 --coverage 0.15 --rounds 3)
    prefill=(--device cpu --tiny --rounds 1)
else
    tests=(tests/replicas/test_triton_kernels.py -m gpu)
    # most of their time goes into compiling
    "$python" -c "import xdist" 2>/dev/null && tests+=(-n 8)
    exactness=() attention=() prefill=()
fi

part kernels 130 "torch, triton, pytest" \
    "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"
if [[ $device != cpu ]]; then
    part page-lock 40 "torch, cupy, kv_tier, pytest" \
        "$python" -m pytest -q -p no:cacheprovider tests/kv_tier/test_page_lock.py -m gpu
fi
part exactness 60 "torch, transformers, kv_tier" \
    "$python" -m benchmarks.gpu_exactness "${exactness[@]}"
part attention 80 "torch, triton" \
    "$python" -m benchmarks.bench_attention "${attention[@]}"
if [[ $device != cpu ]]; then
    part tiles 50 "torch, triton" \
        "$python" -m benchmarks.bench_attention --sweep --shapes qwen3-8b --tokens 16384 \
        --coverage 0.15
fi
part prefill 100 "torch, transformers, kv_tier" \
    "$python" -m benchmarks.bench_gpu_prefill "${prefill[@]}"
part copy 40 "torch, triton" \
    "$python" -m benchmarks.bench_copy

printf '\n'
"$python" -m benchmarks.summarise_device "$logs" "$out/device-$(date -u +%Y%m%d-%H%M%S).json"
