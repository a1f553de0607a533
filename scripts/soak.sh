#!/usr/bin/env bash
# Soaks the release binary: soak.sh [MINUTES] [FLAGS of foretoken]. The model is SmolLM2 (or the embedded pair,
# with `--model foretoken-demo` among the flags), in a pool so small that requests are preempted.
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-10}
shift || true
if [ $# = 0 ]; then
    scripts/fetch-smollm2.sh
    set -- --model models/SmolLM2-135M-Instruct.Q4_1.gguf
fi
binary=${FORETOKEN:-target/release/foretoken}
[ -n "${FORETOKEN:-}" ] || cargo build --release --locked

log=$(mktemp)
RUST_LOG=${RUST_LOG:-warn} "$binary" "$@" --port 0 --num-blocks 100 --max-num-seqs 16 --max-waiting 64 >"$log" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -f "$log"' EXIT
until url=$(grep -o 'http://[0-9.:]*' "$log" | head -n 1) && [ -n "$url" ]; do
    kill -0 $server
    sleep 0.1
done
python3 scripts/soak.py --url "$url" --minutes "$minutes" --pid $server --need-preemptions

# It must still end as it should.
kill -TERM $server
wait $server
