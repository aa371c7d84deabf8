#!/usr/bin/env bash
# Two "machines" on one: a server over two network namespaces, whose only way to each other is a
# cable (veth) that is cut at the end. Needs Linux, root and ip(8); leaves nothing behind.
#
#   sudo -E env PATH="$PATH" scripts/try_two_nodes.sh [more flags of `minisgl serve`]
#
# It shows: what one rank answers and what two nodes answer, which addresses they listen at, and
# how long after the cut both have ended. Exits with 1 if the answers differ, if anything listens
# at another address than the cable's, or if a node is still there 10 s after the cut.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
fi

A="minisgl-a-$$" B="minisgl-b-$$" WORK=$(mktemp -d) PIDS=()
cleanup() {
  for pid in "${PIDS[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${PIDS[@]}"; do wait "$pid" 2>/dev/null || true; done
  ip netns del "$A" 2>/dev/null || true
  ip netns del "$B" 2>/dev/null || true
  rm -rf "$WORK"
}
trap cleanup EXIT

ip netns add "$A"
ip netns add "$B"
ip -n "$A" link add cable type veth peer name cable netns "$B"
ip -n "$A" addr add 10.77.0.1/24 dev cable
ip -n "$B" addr add 10.77.0.2/24 dev cable
for ns in "$A" "$B"; do
  ip -n "$ns" link set lo up
  ip -n "$ns" link set cable up
done

start() { # namespace, name, flags ...
  local ns=$1 name=$2
  shift 2
  ip netns exec "$ns" python -m minisgl --dtype float32 --num-pages 256 "$@" \
    >"$WORK/$name.out" 2>"$WORK/$name.err" &
  PIDS+=("$!")
}
ready() { # name
  for _ in $(seq 600); do
    if grep -q Serving "$WORK/$1.out"; then return; fi
    sleep 0.1
  done
  cat "$WORK"/*.err
  exit 1
}
ask() { # namespace, port
  ip netns exec "$1" python - "$2" <<'PY'
import json, sys, urllib.request
body = {"model": "any", "prompt": "The quick brown fox", "max_tokens": 32, "temperature": 0,
        "ignore_eos": True}
url = f"http://127.0.0.1:{sys.argv[1]}"
with urllib.request.urlopen(f"{url}/v1/models") as models:
    body["model"] = json.load(models)["data"][0]["id"]
request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as answer:
    print(json.dumps(json.load(answer)["choices"][0]["text"]))
PY
}

start "$A" alone --port 1919 "$@"
ready alone
ONE=$(ask "$A" 1919)
kill "${PIDS[0]}"
wait "${PIDS[0]}" || true
PIDS=()

NODES=(--tp 2 --nnodes 2 --dist-init-addr 10.77.0.1:2000)
start "$A" node-0 --port 1920 "${NODES[@]}" --node-rank 0 "$@"
start "$B" node-1 "${NODES[@]}" --node-rank 1 "$@"
ready node-0
TWO=$(ask "$A" 1920)
echo "one rank:  $ONE"
echo "two nodes: $TWO"
for ns in "$A" "$B"; do
  ip netns exec "$ns" ss -Hltn | awk -v ns="${ns:8:1}" '{print "node " ns " listens at " $4}'
done | tee "$WORK/listens"

ip -n "$A" link set cable down
CUT=$(date +%s%N)
for pid in "${PIDS[@]}"; do
  timeout 10 tail --pid="$pid" -f /dev/null || { echo "process $pid did not end"; exit 1; }
done
echo "both had ended $((($(date +%s%N) - CUT) / 1000000)) ms after the cut:"
tail -qn 1 "$WORK"/node-?.err
PIDS=()

[ "$ONE" = "$TWO" ] || { echo "the answers differ"; exit 1; }
if grep -v -e ' 10\.77\.0\.[12]:' -e ' 127\.0\.0\.1:1920$' "$WORK/listens"; then
  echo "this listens at an address that it should not"
  exit 1
fi
