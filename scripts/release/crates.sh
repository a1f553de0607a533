#!/usr/bin/env bash
# Checks the crates of the workspace as docs.rs and crates.io would have them: crates.sh [FLAG...]
# The documentation is made without a warning, with the features that the manifests name for docs.rs. Each crate is packed
# and then built from what was packed, in the order of dependencies. The FLAGs go to `cargo package`: --no-verify builds
# nothing, --allow-dirty takes files that are not committed. Nothing is published; only the index of crates is read.
set -euo pipefail
cd "$(dirname "$0")/../.."

# What crates.io takes of a crate, in bytes, unless it was asked to take more.
LIMIT=10485760

# The feature clap of the libraries is one that the program needs.
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --features otel
cargo package --locked --workspace "$@"

metadata=$(cargo metadata --locked --no-deps --format-version 1)
python3 - "$LIMIT" "$metadata" <<'PYTHON'
import json
import sys
from pathlib import Path

limit, metadata = int(sys.argv[1]), json.loads(sys.argv[2])
for package in metadata["packages"]:
    crate = Path(metadata["target_directory"]) / "package" / f"{package['name']}-{package['version']}.crate"
    if not crate.exists():
        continue
    size = crate.stat().st_size
    note = "" if size <= limit else f"; crates.io takes {limit:,} unless it was asked for more"
    print(f"{crate.name}: {size:,} bytes{note}")
PYTHON
