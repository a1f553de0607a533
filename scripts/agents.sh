#!/usr/bin/env bash
# Runs coding agents, in pinned versions, against a binary: agents.sh [--model FILE] [--only NAMES] [--record FOLDER]
# [FLAGS of foretoken]. One line is printed for each agent; agents.py says what is checked. FORETOKEN is the binary,
# default target/release/foretoken; AGENTS is where the agents are installed (1.5 GB), if they are not there yet.
set -euo pipefail
cd "$(dirname "$0")/.."

node_agents="@anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4"
python_agents="aider-chat==0.86.2"

command -v npm >/dev/null || { echo "agents: npm is needed" >&2; exit 1; }
binary=${FORETOKEN:-target/release/foretoken}
[ -n "${FORETOKEN:-}" ] || cargo build --release --locked
installed=${AGENTS:-target/agents}
mkdir -p "$installed/node"

SECONDS=0
[ -e "$installed/node/package.json" ] || echo '{"private": true}' >"$installed/node/package.json"
# npm may be set to run no scripts of packages. Two of them put their program in place with one.
# shellcheck disable=SC2086
npm install --prefix "$installed/node" --silent --no-audit --no-fund --save-exact --ignore-scripts $node_agents
(cd "$installed/node/node_modules/@anthropic-ai/claude-code" && node install.cjs)
(cd "$installed/node/node_modules/opencode-ai" && node postinstall.mjs)
[ -x "$installed/aider/bin/python" ] || python3 -m venv "$installed/aider"
# shellcheck disable=SC2086
"$installed/aider/bin/pip" install --quiet --disable-pip-version-check $python_agents
echo "agents: installed in $SECONDS s"

export PYTHONDONTWRITEBYTECODE=1
SECONDS=0
failed=0
python3 scripts/agents.py --binary "$binary" --installed "$installed" "$@" || failed=1
echo "agents: $SECONDS s in all, $([ "$failed" = 0 ] && echo 'all passed' || echo 'with failures')"
exit "$failed"
