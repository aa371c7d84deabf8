#!/usr/bin/env bash
# Run the tests as on CPUs of other instruction sets: our kernels and torch's are limited to each.
#
#   scripts/instruction_sets.sh [SET ...]     SET: avx2, sse2 (default: both); PYTEST_ARGS: pytest's
#
# The processor must have the set. On two cores each set takes as long as `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ $# -gt 0 ] || set -- avx2 sse2
failed=0
for isa in "$@"; do
    case $isa in
    avx2) torch=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2) ;;
    sse2) torch=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41) ;;
    *) echo "there is no set '$isa'; there are: avx2 sse2" >&2 && exit 2 ;;
    esac
    echo "== $isa"
    env MINISGL_CPU_ISA="$isa" "${torch[@]}" "$python" -m pytest ${PYTEST_ARGS:--n 3 --dist worksteal} || failed=1
done
exit "$failed"
