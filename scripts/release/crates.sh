#!/usr/bin/env bash
# Checks the crates of the workspace as docs.rs and crates.io would have them: crates.sh [--publish] [FLAG...]
# The documentation is made without a warning, with the features that the manifests name for docs.rs. Each crate is packed
# and then built from what was packed, in the order of dependencies, and the program built so serves its demonstration. One
# crate would be larger than crates.io takes, so this happens in a copy of the repository in target/crates, where
# split_models.py divides it. The FLAGs go to `cargo package`: --no-verify builds nothing, --allow-dirty takes files that are
# not committed. Nothing is published without --publish, which needs the token of crates.io that `cargo login` takes; only the
# index of crates is read.
set -euo pipefail
cd "$(dirname "$0")/../.."

# What crates.io takes of a crate, in bytes.
LIMIT=10485760

publish=0 verify=1 flags=()
for flag; do
    case $flag in
    --publish) publish=1 ;;
    --no-verify) verify=0 flags+=("$flag") ;;
    *) flags+=("$flag") ;;
    esac
done
if ! git diff --quiet HEAD -- && [[ " ${flags[*]} " != *" --allow-dirty "* ]]; then
    echo "crates.sh: files differ from the commit: commit them, or pass --allow-dirty" >&2
    exit 2
fi

# The feature clap of the libraries is one that the program needs.
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --features otel

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
copy=$target/crates
rm -rf "$copy" "$target"/package/foretoken*
mkdir -p "$copy"
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$copy"
scripts/release/split_models.py "$copy"
export CARGO_TARGET_DIR=$target
answers=$PWD/scripts/release/answers.py
cd "$copy"
# It adds the new crate to Cargo.lock, and changes nothing else there.
cargo update --quiet --workspace
# What was packed is built there, too; an older program would be none of it.
program=$target/debug/foretoken
rm -f "$program"
cargo package --locked --workspace "${flags[@]}"

echo "packed, bytes:"
stat --format '%s %n' "$target"/package/*.crate | sed 's| .*/| |'
too_large=$(find "$target"/package -maxdepth 1 -name '*.crate' -size +${LIMIT}c -printf '%f ')
if [ -n "$too_large" ]; then
    echo "crates.sh: crates.io takes $LIMIT bytes of a crate: ${too_large}must be smaller" >&2
    exit 1
fi
[ "$verify" = 0 ] || "$answers" "$program" serve
[ "$publish" = 0 ] || cargo publish --locked --workspace --no-verify
