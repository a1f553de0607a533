#!/usr/bin/env bash
# Runs foretoken behind Ray Serve and behind two routers on this machine, with two replicas of the embedded pair, and
# checks what a user relies on: test.sh [PART...], parts being `routers` and `ray`. FORETOKEN names the
# program (else it is built), DEPLOY_ENV a folder for the Python environments.
set -euo pipefail
cd "$(dirname "$0")/.."

env=${DEPLOY_ENV:-target/deploy}
# environment NAME: has the packages of deploy/NAME/requirements.txt.
environment() {
    local folder=$env/$1 wanted=deploy/$1/requirements.txt
    cmp -s "$wanted" "$folder/requirements.txt" && return
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" "$folder/requirements.txt"
}
environment ray
environment routers
binary=${FORETOKEN:-target/release/foretoken}
[ -n "${FORETOKEN:-}" ] || cargo build --release --locked

exec "$env/ray/bin/python" deploy/test.py --binary "$binary" --routers "$env/routers/bin" "$@"
