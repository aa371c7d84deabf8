#!/usr/bin/env bash
# Run the GPU tests, then the benchmarks whose JSON docs/performance.md quotes, on a machine with an
# NVIDIA GPU and a CUDA build of torch. Over half an hour on one H200, ten minutes more on four. It does not
# make h200-experiments.json, peers-h200.json and the files that are named after a commit.
#
#   scripts/gpu_check.sh [OUT]      OUT: where the JSON goes (default: benchmarks/results)
#
# Packages that are missing are installed beside the interpreter's own, into a temporary folder;
# torch is never touched. WHEELS=DIR installs from wheel files there instead, without a network.
# SHAPES="qwen3-0.6b qwen3-14b" says which model shapes are measured offline, REPEATS how often, and
# PARTS="tests serving" which of its parts run, in that order.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
all="tests memcheck same offline kernels serving stalls ranks"
parts=${PARTS:-$all}
for part in $parts; do
    if [[ " $all " != *" $part "* ]]; then
        echo "PARTS: there is no part '$part'; there are: $all" >&2
        exit 2
    fi
done

"$python" -c 'import torch; assert torch.cuda.is_available(), "torch finds no CUDA device"'
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$site" "$WHEELS"/*.whl
else
    missing=()
    for pair in msgspec:msgspec zmq:pyzmq tvm_ffi:apache-tvm-ffi psutil:psutil httpx:httpx \
        tokenizers:tokenizers safetensors:safetensors jinja2:jinja2 fastapi:fastapi \
        uvicorn:uvicorn prompt_toolkit:prompt_toolkit rich:rich ninja:ninja \
        huggingface_hub:huggingface_hub transformers:transformers pytest:pytest \
        httptools:httptools prometheus_client:prometheus-client aiohttp:aiohttp numpy:numpy \
        pytest_timeout:pytest-timeout xdist:pytest-xdist openai:openai \
        llguidance:llguidance; do
        "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} -eq 0 ] ||
        "$python" -m pip install -q --target "$site" "${missing[@]}"
fi
mkdir -p "$out"
export PYTHONPATH="$PWD/python:${PYTHONPATH:+$PYTHONPATH:}$site"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
repeats=${REPEATS:-3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')

tests() { # a failure is named when it happens, so that a time limit hides none
    "$python" -m pytest -v -n "${JOBS:-8}" tests/gpu | { grep -v "PASSED\|SKIPPED" || true; }
}

memcheck() { # a thousand requests with aborts and retractions
    if ! command -v compute-sanitizer >/dev/null; then
        echo "no compute-sanitizer here: memcheck is left out"
        return
    fi
    TRITON_DISABLE_LINE_INFO=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        --target-processes all "$python" -m pytest -q tests/gpu/test_gpu_engine.py \
        -k "thousand" --timeout 1800
}

same() { # the same answer, whatever happens around a request
    "$python" -m minisgl selfcheck
    "$python" -m minisgl_bench.studies batch_invariance --json "$out/batch-invariance.json"
}

offline() {
    for shape in ${SHAPES:-qwen3-0.6b qwen3-14b qwen3-30b-a3b}; do
        "$python" -m minisgl_bench offline --shape "$shape" --repeats "$repeats" \
            --json "$out/offline-$shape.json"
    done
}

kernels() {
    "$python" -m minisgl_bench.studies attention --json "$out/attention.json"
    "$python" -m minisgl_bench.studies moe --json "$out/moe-h200.json" \
        --shapes qwen3-30b-a3b,qwen3-30b-a3b-tp2,qwen3-235b-a22b-tp4
    "$python" -m minisgl_bench.studies gemms --json "$out/gemms.json"
}

serving() {
    "$python" -m minisgl_bench serving --starts 3 --client-processes 6 \
        --repeats "$repeats" --json "$out/serving-qwen3-0.6b.json"
}

stalls() { # what holds up running streams: prompts, within three bounds
    for ms in 5 10 20; do
        "$python" -m minisgl_bench serving --starts 1 --client-processes 6 \
            --workloads streams,mixed --repeats "$repeats" \
            --json "$out/serving-qwen3-0.6b-stall-$ms.json" -- --max-stall-ms "$ms"
    done
}

ranks() {
    for tp in 2 4; do
        [ "$gpus" -ge "$tp" ] || continue
        "$python" -m minisgl_bench serving --shape qwen3-32b --tp "$tp" --dummy-weight \
            --starts 2 --client-processes 6 --repeats "$repeats" \
            --json "$out/serving-qwen3-32b-tp$tp.json" \
            --workloads throughput,single,prefill,streams,mixed,batch1,batch16,batch64,batch256
    done
}

for part in $parts; do
    echo "== $part"
    "$part"
done
