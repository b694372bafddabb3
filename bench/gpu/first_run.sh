#!/usr/bin/env bash
# First run of the CUDA path on a machine with one GPU, in less than 8 minutes:
#
#   bench/gpu/first_run.sh OUT                 environment, correctness, kernels, goals
#   bench/gpu/first_run.sh OUT --rehearse      all but the goals on a CPU, with tiny shapes: the figures mean nothing
#
# Needs torch 2.11, triton 3.6, transformers 5.17, or newer, numpy and pytest; PYTHON names another interpreter. Each
# part is a process with a limit of its own; its output and figures are in OUT after it, whatever becomes of the others.
# Exits with the number of parts that failed.
set -u

out=${1:?"usage: $0 OUT [--rehearse]"}
mode=${2:-}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.." || exit 1
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=0

if [ "$mode" = --rehearse ]; then
    export TRITON_INTERPRET=1
    device="--device cpu --tiny"
    kernel_seconds=1000
    patience=6 # the machine may be busy, and no GPU waits
    chosen="test_machine or not_a_number" # all are collected; interpreted, all would take minutes
    shards=1
elif [ -n "$mode" ]; then
    echo "usage: $0 OUT [--rehearse]" >&2
    exit 1
else
    export TRITON_INTERPRET=0
    device="--device cuda"
    kernel_seconds=75
    patience=1
    chosen=
    shards=12
fi
# The others need no GPU.
tests=$(ls tests/engine/cuda/test_*.py | grep -v -e test_compiling -e test_graph_sizes)

part() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 began=$SECONDS status
    shift 2
    echo "== $name, at most $seconds s"
    timeout -k 10 $((seconds * patience)) "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || failed=$((failed + 1))
    echo "$name: exit status $status after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
}

correctness() { # shards in parallel: compiling takes most of the time, and a lost device ends one shard alone
    local pids=() status=0 at section
    if [ "$TRITON_INTERPRET" = 0 ]; then # compiles the kernels that are timed later, and keeps them on disk
        for section in decode chunk skinny products elementwise draw; do
            timeout 75 "$python" -m bench.gpu.kernels --sections $section --seconds 70 > "$out/compile-$section.log" 2>&1 &
        done
    fi
    for ((at = 0; at < shards; at++)); do
        # shellcheck disable=SC2086
        DECANT_TEST_SHARD=$at/$shards "$python" -m pytest -q -c bench/gpu/cuda-tests.ini --rootdir=. \
            --confcutdir=tests/engine/cuda ${chosen:+-k "$chosen"} $tests > "$out/correctness-$at.log" 2>&1 &
        pids+=($!)
    done
    for at in "${!pids[@]}"; do
        wait "${pids[$at]}" || status=1
        echo "shard $at: $(tail -n 1 "$out/correctness-$at.log")"
    done
    wait
    grep -h -e ^FAILED -e ^ERROR "$out"/correctness-*.log
    return $status
}

export python out tests chosen shards
export -f correctness
: > "$out/summary.txt"
# shellcheck disable=SC2086
{
    part environment 30 "$python" -m bench.gpu.environment
    part correctness 100 bash -c correctness
    part kernels 90 "$python" -m bench.gpu.kernels $device --seconds $kernel_seconds --json "$out/kernels.json"
    if [ "$mode" != --rehearse ]; then # python -m bench.gpu --device cpu --tiny rehearses both
        part goals 160 "$python" -m bench.gpu $device --parts decode,prompt,idle --seconds 140 --json "$out/goals.json"
        part queue 80 "$python" -m bench.gpu $device --parts queue --seconds 60 --json "$out/queue.json"
    fi
}
echo "== summary, also in $out"
cat "$out/summary.txt"
exit $failed
