#!/usr/bin/env bash
# Tests of the C++ kernels of a CPU under GCC's sanitizers:
#
#   scripts/sanitize.sh address [tests ...]   wrong addresses (ASan) and undefined behaviour (UBSan)
#   scripts/sanitize.sh thread [tests ...]    data races (TSan)
#
# Without tests it runs those of kernels and attention that use the kernels, on three threads.
# The first test compiles the kernels without optimisation (100 s of CPU time) into FOLDER, a new one by
# default. PYTHON is the interpreter. Exits with 1 if a test fails or a sanitizer reports something.
# Needs Linux and g++.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-}
case $kind in
  address) flags=address,undefined libraries="libasan.so libubsan.so libstdc++.so" ;;
  thread) flags=thread libraries="libtsan.so libstdc++.so" ;;
  *) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
shift
folder=${FOLDER:-$(mktemp -d)} log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
mkdir -p "$folder"

# After the kernels' own options, so that these count. The name belongs to the key of the cache.
export CXX="$folder/$kind-g++" MINISGL_CACHE_DIR="$folder"
[ -e "$CXX" ] || printf '#!/bin/sh\nexec g++ "$@" -O0 -g1 -w -fsanitize=%s\n' "$flags" >"$CXX"
chmod +x "$CXX"

echo 'import torch; pytest_configure = lambda config: torch.set_num_threads(3)' >"$log/three_threads.py"
# Locks of torch and of the dynamic linker, which TSan does not see.
printf '%s\n' called_from_lib:lib{gomp,torch_cpu,c10} mutex:torch race:_dl_deallocate_tls >"$log/not-ours"
export ASAN_OPTIONS="log_path=$log/report:detect_leaks=0:abort_on_error=1"
export UBSAN_OPTIONS="log_path=$log/report:print_stacktrace=1"
export TSAN_OPTIONS="log_path=$log/report:exitcode=0:suppressions=$log/not-ours"
export PYTHONMALLOC=malloc PYTHONPATH="$log"
if [ $# -eq 0 ]; then
  set -- tests/core/attention tests/zoo/kernel tests/kernels/test_recording.py tests/core/kernel/test_{radix,sampling,threads,twins}.py
fi
# A process of a sanitizer has no use for a limit of its memory, and none for a fork with threads.
unfit=(--deselect tests/core/kernel/test_threads.py::test_what_the_system_refuses_does_not_end_the_process)
unfit+=(--deselect tests/core/kernel/test_threads.py::test_a_fork_has_workers_of_its_own)
preload=$(for library in $libraries; do g++ -print-file-name="$library"; done | paste -sd ' ')
code=0
# TSan needs a process whose addresses are not random.
setarch -R env LD_PRELOAD="$preload" "${PYTHON:-python}" -m pytest -n 0 -q -p three_threads --timeout 1800 "${unfit[@]}" "$@" \
  || code=1
if compgen -G "$log/report.*" >/dev/null; then
  cat "$log"/report.*
  code=1
fi
exit $code
