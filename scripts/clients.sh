#!/usr/bin/env bash
# Runs stock clients, in pinned versions, against a binary with SmolLM2: clients.sh [--short] [FLAGS of foretoken]. One
# line is printed for each check. --short leaves out lm-eval and what takes long answers. FORETOKEN is the binary,
# default target/release/foretoken; CLIENTS is where the clients are installed, if they are not there yet.
set -euo pipefail
cd "$(dirname "$0")/.."

python_clients="openai==3.54.0 anthropic==2.12.0 langchain-openai==1.7.3 pydantic-ai-slim[openai]==2.68.0 ollama==0.6.3"
# They need older versions of what the others need.
python_evals="instructor==1.17.0 lm-eval[api]==0.4.13"
node_clients="openai@7.57.0 ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7 ollama@0.6.4"

short=()
if [ "${1:-}" = --short ]; then
    short=(--short)
    shift
    python_evals="instructor==1.17.0"
fi
if [ $# = 0 ]; then
    scripts/fetch-smollm2.sh
    set -- --model models/SmolLM2-135M-Instruct.Q4_1.gguf
fi
binary=${FORETOKEN:-target/release/foretoken}
[ -n "${FORETOKEN:-}" ] || cargo build --release --locked
installed=${CLIENTS:-target/clients}
mkdir -p "$installed"

# with_python NAME PACKAGES: a virtual environment.
with_python() {
    local venv="$installed/$1"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet --disable-pip-version-check $2
}

SECONDS=0
with_python clients "$python_clients"
with_python "evals${short[*]}" "$python_evals"
# What the clients need.
has_node() { command -v npm >/dev/null && node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)'; }
if has_node; then
    mkdir -p "$installed/node"
    [ -e "$installed/node/package.json" ] || echo '{"private": true}' >"$installed/node/package.json"
    # shellcheck disable=SC2086
    npm install --prefix "$installed/node" --silent --no-audit --no-fund --save-exact $node_clients
fi
echo "clients: installed in $SECONDS s"

logs=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT

# Starts a server with the flags; sets `url`.
start() {
    local log="$logs/${#servers[@]}"
    : >"$log"
    RUST_LOG=${RUST_LOG:-warn} "$binary" "$@" --port 0 --api-key secret >"$log" &
    servers+=($!)
    until url=$(grep -o 'http://[0-9.:]*' "$log" | head -n 1) && [ -n "$url" ]; do
        kill -0 "${servers[-1]}"
        sleep 0.1
    done
}

start "$@" --tool-call-parser hermes
plain=$url
start "$@" --reasoning-parser deepseek_r1
reasoning=$url
start --model tests/fixtures/embeddings
embeddings=$url

failed=0
export PYTHONDONTWRITEBYTECODE=1
clients=$installed/clients/bin/python
"$clients" scripts/clients.py --url "$plain" --reasoning-url "$reasoning" "${short[@]}" || failed=1
"$clients" scripts/clients_openai.py --url "$plain" "${short[@]}" || failed=1
"$clients" scripts/clients_ollama.py --url "$plain" --reasoning-url "$reasoning" --embeddings-url "$embeddings" \
    "${short[@]}" || failed=1
"$clients" scripts/clients_embeddings.py --url "$embeddings" "${short[@]}" || failed=1
"$installed/evals${short[*]}/bin/python" scripts/clients_evals.py --url "$plain" "${short[@]}" || failed=1
if has_node; then
    # Modules are looked for beside the script.
    cp scripts/clients.mjs "$installed/node/"
    node "$installed/node/clients.mjs" "$plain" || failed=1
else
    echo "not run here: clients in Node"
fi
echo "stock clients: $SECONDS s in all, $([ "$failed" = 0 ] && echo 'all passed' || echo 'with failures')"
exit "$failed"
