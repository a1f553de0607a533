#!/usr/bin/env bash
# Sends requests that schemathesis makes up from /openapi.json to a server with the embedded model (or with other
# FLAGS): schemathesis.sh [FLAGS of foretoken]. It fails if an answer is a 5xx, or has a status, content type, header
# or shape that the document does not have. FORETOKEN is the binary, default target/release/foretoken; VENV is where
# schemathesis is installed, if it is not there yet; MAX_EXAMPLES bounds the requests of each phase and route.
set -euo pipefail
cd "$(dirname "$0")/.."

tool="schemathesis==4.32.5"

binary=${FORETOKEN:-target/release/foretoken}
[ -n "${FORETOKEN:-}" ] || cargo build --release --locked
venv=${VENV:-target/schemathesis-venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check "$tool"

scratch=$(mktemp -d)
server=
trap 'kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT
# Short answers, because what is tested is their shape.
RUST_LOG=${RUST_LOG:-warn} "$binary" --max-model-len 64 "$@" --port 0 >"$scratch/server" &
server=$!
until url=$(grep -o 'http://[0-9.:]*' "$scratch/server" | head -n 1) && [ -n "$url" ]; do
    kill -0 "$server"
    sleep 0.1
done
# Hypothesis keeps its examples where it runs.
here=$PWD
case $venv in /*) ;; *) venv=$here/$venv ;; esac
cd "$scratch"
"$venv/bin/schemathesis" run "$url/openapi.json" \
    --checks not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance \
    --max-examples "${MAX_EXAMPLES:-50}" --seed 1 --request-timeout 60 --workers 2
