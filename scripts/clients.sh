#!/usr/bin/env bash
# Runs stock clients, in pinned versions, against a binary with SmolLM2: clients.sh [FLAGS of foretoken]. One line is
# printed for each check. FORETOKEN is the binary, default target/release/foretoken; VENV is where the clients are
# installed, if they are not there yet.
set -euo pipefail
cd "$(dirname "$0")/.."

clients="openai==3.54.0 anthropic==2.12.0"

if [ $# = 0 ]; then
    scripts/fetch-smollm2.sh
    set -- --model models/SmolLM2-135M-Instruct.Q4_1.gguf
fi
binary=${FORETOKEN:-target/release/foretoken}
[ -n "${FORETOKEN:-}" ] || cargo build --release --locked
venv=${VENV:-target/clients-venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
# shellcheck disable=SC2086
"$venv/bin/pip" install --quiet --disable-pip-version-check $clients

logs=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT

# Starts a server with the flags; sets `url`.
start() {
    local log="$logs/${#servers[@]}"
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
"$venv/bin/python" scripts/clients.py --url "$plain" --reasoning-url "$url"
