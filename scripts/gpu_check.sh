#!/usr/bin/env bash
# From a machine with an NVIDIA GPU and a CUDA build of torch to GPU tests and benchmark JSON.
#
#   scripts/gpu_check.sh [OUT]      OUT: where the JSON goes (default: benchmarks/results)
#
# Packages that are missing are installed beside the interpreter's own, into a temporary folder;
# torch is never touched. WHEELS=DIR installs from wheel files there instead, without a network.
# SHAPES="qwen3-0.6b qwen3-14b" says which model shapes are measured, REPEATS how often.
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
        pytest_timeout:pytest-timeout xdist:pytest-xdist; do
        "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} -eq 0 ] ||
        "$python" -m pip install -q --target "$site" "${missing[@]}"
fi
export PYTHONPATH="$PWD/python:${PYTHONPATH:+$PYTHONPATH:}$site"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -m pytest -q -n "${JOBS:-8}" tests/gpu
for shape in ${SHAPES:-qwen3-0.6b qwen3-14b}; do
    "$python" -m minisgl.benchmark offline --shape "$shape" --repeats "${REPEATS:-3}" \
        --json "$out/offline-$shape.json"
done
