# docker build -t minisgl .
# docker run --gpus all --ipc host -p 1919:1919 -v ~/.cache/huggingface:/home/minisgl/.cache/huggingface \
#     minisgl --model Qwen/Qwen3-0.6B
#
# The second stage holds Python, a C++ compiler (for Triton's launchers and our CPU kernels) and the
# packages. It needs no CUDA toolkit: Triton and NVRTC, which come with torch, compile the GPU's kernels.
# Without --gpus it serves on the CPU.
FROM python:3.12-slim AS packages
COPY . /source
RUN python -m venv /opt/minisgl && \
    /opt/minisgl/bin/pip install --no-cache-dir "/source[cuda,otel]"

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home minisgl
COPY --from=packages /opt/minisgl /opt/minisgl
USER minisgl
ENV PATH=/opt/minisgl/bin:$PATH
EXPOSE 1919
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s CMD \
    python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1919/health', timeout=4)"
ENTRYPOINT ["python", "-m", "minisgl", "--host", "0.0.0.0"]
