#!/usr/bin/env bash
# From a machine with an NVIDIA GPU and a CUDA build of torch to GPU tests and benchmark JSON, all the
# files that docs/performance-cuda.md quotes: about ten minutes on one H200, ten more on four.
#
#   scripts/gpu_check.sh [OUT]      OUT: where the JSON goes (default: benchmarks/results)
#
# Packages that are missing are installed beside the interpreter's own, into a temporary folder;
# torch is never touched. WHEELS=DIR installs from wheel files there instead, without a network.
# SHAPES="qwen3-0.6b qwen3-14b" says which model shapes are measured offline, REPEATS how often.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-python3}

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
        pytest_timeout:pytest-timeout xdist:pytest-xdist openai:openai; do
        "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} -eq 0 ] ||
        "$python" -m pip install -q --target "$site" "${missing[@]}"
fi
export PYTHONPATH="$PWD/python:${PYTHONPATH:+$PYTHONPATH:}$site"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -m pytest -q -n "${JOBS:-8}" tests/gpu
if command -v compute-sanitizer >/dev/null; then
    TRITON_DISABLE_LINE_INFO=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        --target-processes all "$python" -m pytest -q tests/gpu/test_gpu_engine.py \
        -k "thousand" --timeout 1800
fi
repeats=${REPEATS:-3}
for shape in ${SHAPES:-qwen3-0.6b qwen3-14b qwen3-30b-a3b}; do
    "$python" -m minisgl.benchmark offline --shape "$shape" --repeats "$repeats" \
        --json "$out/offline-$shape.json"
done
"$python" -m minisgl.benchmark attention --json "$out/attention.json"
"$python" -m minisgl.benchmark moe --json "$out/moe.json" \
    --shapes qwen3-30b-a3b,qwen3-30b-a3b-tp2,qwen3-235b-a22b-tp4
"$python" -m minisgl.benchmark serving --starts 4 --client-processes 6 --repeats "$repeats" \
    --json "$out/serving-qwen3-0.6b.json"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
for tp in 2 4; do
    [ "$gpus" -ge "$tp" ] || continue
    "$python" -m minisgl.benchmark all_reduce --ranks "$tp" --json "$out/all-reduce-tp$tp.json"
    "$python" -m minisgl.benchmark serving --shape qwen3-32b --tp "$tp" --dummy-weight --starts 2 \
        --client-processes 6 --repeats "$repeats" --json "$out/serving-qwen3-32b-tp$tp.json" \
        --workloads throughput,single,prefill,streams,mixed,batch1,batch16,batch64,batch256
done
