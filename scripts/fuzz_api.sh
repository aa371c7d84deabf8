#!/usr/bin/env bash
# fuzz_api.sh URL [EXAMPLES]: send generated requests to a server with the built-in model, from its
# own OpenAPI document. Fails on a 5xx, and on an answer that the document does not describe. A 504
# is what a request with a timeout of 0.001 s asks for.
#
#   python -m venv fuzz && fuzz/bin/pip install schemathesis
#   minisgl serve --port 1919 --num-pages 64 &
#   PATH=$PWD/fuzz/bin:$PATH scripts/fuzz_api.sh http://127.0.0.1:1919
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
fi
url=${1:?say the URL of a server: fuzz_api.sh URL}
url=${url%/} examples=${2:-40}
checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance
config=$(mktemp --suffix=.toml)
trap 'rm -f "$config"' EXIT
printf '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n' >"$config"
# Profiles write files, /metrics is no JSON, and the X-ray is the page's own.
schemathesis --config-file "$config" run "$url/openapi.json" --checks "$checks" --max-examples "$examples" \
    --phases examples,coverage,fuzzing --request-timeout 60 --continue-on-failure --seed 1 \
    --exclude-path-regex "profile|metrics|xray"
