#!/usr/bin/env bash
# Makes the artefacts of a release from this checkout: release.sh [--targets LIST] [--out DIR] [--repository URL]
#                                                                  [--program FILE] [--allow-dirty]
#   LIST        targets, separated by commas; the default is DEFAULT_TARGETS below. "cuda" is a build with
#               --features cuda for this machine's target, and needs nvcc. "none" builds nothing: only the checksums,
#               the inventory and the packaging of what is already in DIR are made, as for artefacts of other machines.
#   DIR         [default: target/release-artefacts]
#   URL         where releases are published, for the packaging files [default: repository of Cargo.toml]
#   FILE        a ready program of the one target: it is packed, nothing is built, and there is no wheel
# Needs rustup, git, python3 with venv, and dpkg-deb for Debian packages. The network is used for crates, for the tools
# of scripts/release/requirements.txt and for rustup's targets only. Two runs on one commit are to
# give the same bytes. docs/release.md describes the artefacts.
set -euo pipefail
cd "$(dirname "$0")/.."

DEFAULT_TARGETS=x86_64-unknown-linux-musl,aarch64-unknown-linux-musl,x86_64-unknown-linux-gnu,aarch64-unknown-linux-gnu
# The oldest C libraries that the wheels and the binaries of *-gnu run with.
GLIBC=manylinux_2_17
MUSL=musllinux_1_2

targets=$DEFAULT_TARGETS out=target/release-artefacts repository='' dirty=0 ready=''
fail() { echo "release.sh: $*" >&2 && exit 2; }
while [ $# != 0 ]; do
    case $1 in
    --targets) targets=${2?} && shift ;;
    --out) out=${2?} && shift ;;
    --repository) repository=${2?} && shift ;;
    --program) ready=$(realpath "${2?}") && shift ;;
    --allow-dirty) dirty=1 ;;
    *) fail "$1 is not known: --targets, --out, --repository, --program and --allow-dirty are" ;;
    esac
    shift
done
[ -z "$ready" ] || [ -x "$ready" ] || fail "$ready is no program"
case $ready$targets in /*,*) fail "--program needs --targets with the one target of the program" ;; esac

FORETOKEN_COMMIT=$(git rev-parse HEAD)
if ! git diff --quiet HEAD --; then
    [ "$dirty" = 1 ] || fail "files differ from the commit: commit them, or pass --allow-dirty"
    FORETOKEN_COMMIT+=-dirty
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${CARGO_TARGET_DIR:-$PWD/target}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
case $PWD$cargo_home$build in *[[:space:]]*) fail "a path with spaces cannot be removed from the binaries: $PWD, $cargo_home" ;; esac
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"$/\1/p' Cargo.toml)

# What would differ between two machines: times, folders, and who asks.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH FORETOKEN_COMMIT
export RUSTFLAGS="--remap-path-prefix=$cargo_home/registry/src=/registry --remap-path-prefix=$PWD=/foretoken"
export CFLAGS="-ffile-prefix-map=$cargo_home/registry/src=/registry"
# mimalloc notes there when it was compiled, which zig takes for an error; by SOURCE_DATE_EPOCH it is the time of the commit.
export CFLAGS_x86_64_pc_windows_gnu="$CFLAGS -Wno-date-time"
export LC_ALL=C TZ=UTC
umask 022

step() { printf '\n== %s\n' "$*"; }

tools=$build/release-tools
install_tools() {
    [ -x "$tools/bin/python" ] || python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check -r scripts/release/requirements.txt
    export PATH=$tools/bin:$PATH
}

# build_wheel PROGRAM TARGET COMPATIBILITY [FLAG...]: builds PROGRAM, writes its documents, and makes its wheel in $out.
build_wheel() {
    local program=$1 target=$2 compatibility=$3
    shift 3
    [ -d "$(rustc --print target-libdir --target "$target")" ] || rustup target add "$target"
    local make=(maturin build --release --locked --target "$target" --compatibility "$compatibility" --out "$out" "$@")
    # The program is built once; the wheel is made again with its documents.
    "${make[@]}"
    documents "$program"
    "${make[@]}"
}

# documents PROGRAM: writes completions and manual pages to $share, by PROGRAM, also through qemu, or where it does not run
# by one of this commit that does; if there is none, it is built.
share=foretoken.data/data/share
documents() {
    local run=("$1") other command
    "${run[@]}" --version >/dev/null 2>&1 || run=(qemu-aarch64-static -L /usr/aarch64-linux-gnu "$1")
    if ! "${run[@]}" --version >/dev/null 2>&1; then
        run=()
        for other in "$build"/*-linux-*/release/foretoken; do
            [[ $("$other" --version 2>/dev/null) != *"(commit $FORETOKEN_COMMIT;"* ]] || run=("$other")
        done
        if [ ${#run[@]} = 0 ]; then
            cargo build --release --locked
            run=("$build/release/foretoken")
        fi
    fi
    rm -rf foretoken.data
    mkdir -p "$share"/{bash-completion/completions,fish/vendor_completions.d,zsh/site-functions,man/man1}
    "${run[@]}" completions bash >"$share/bash-completion/completions/foretoken"
    "${run[@]}" completions fish >"$share/fish/vendor_completions.d/foretoken.fish"
    "${run[@]}" completions zsh >"$share/zsh/site-functions/_foretoken"
    "${run[@]}" man >"$share/man/man1/foretoken.1"
    # The page of the program names those of its commands.
    for command in $(sed -n 's/^foretoken\\-\([a-z-]*\)(1)$/\1/p' "$share/man/man1/foretoken.1"); do
        "${run[@]}" man "$command" >"$share/man/man1/foretoken-$command.1"
    done
}

# archive NAME BINARY: packs what a user of the program gets.
archive() {
    local name=$1 binary=$2
    python3 scripts/release/pack.py "$out/$name" "$SOURCE_DATE_EPOCH" \
        "$binary" README.md CHANGELOG.md LICENSE LICENSE-APACHE LICENSE-MIT LICENSE-THIRD-PARTY "$share"
}

# debian ARCHITECTURE BINARY: the static binary, so that no version of Debian is too old for it.
debian() {
    local architecture=$1 binary=$2 root
    root=$(mktemp -d)
    # Its mode becomes that of / where the package is installed.
    chmod 755 "$root"
    install -D -m 755 "$binary" "$root/usr/bin/foretoken"
    install -D -m 644 /dev/stdin "$root/usr/lib/systemd/system/foretoken.service" < <(
        # The comment before the first section says how to install it by hand.
        sed -e '1,/^\[Unit\]$/{/^#/d;}' -e 's|/usr/local/bin/|/usr/bin/|' deploy/systemd/foretoken.service
    )
    # Only this machine's own names are allowed until somebody names another.
    install -D -m 644 /dev/stdin "$root/etc/foretoken/foretoken.toml" < <(
        sed -e '/^# Only nginx/d' -e 's/^allowed-hosts/# For a reverse proxy with another name:\n# allowed-hosts/' deploy/systemd/foretoken.toml
    )
    install -D -m 644 -t "$root/usr/share/doc/foretoken" README.md CHANGELOG.md LICENSE-THIRD-PARTY
    cat LICENSE LICENSE-MIT LICENSE-APACHE | install -D -m 644 /dev/stdin "$root/usr/share/doc/foretoken/copyright"
    cp -r "$share" "$root/usr/"
    # Where Debian's zsh looks for those of packages.
    mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions"
    gzip -9n "$root"/usr/share/man/man1/*
    mkdir "$root/DEBIAN"
    sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" \
        -e "s/@SIZE@/$(find "$root" -type f -printf '%s\n' | awk '{ size += int(($1 + 1023) / 1024) } END { print size }')/" \
        deploy/packaging/debian/control >"$root/DEBIAN/control"
    install -m 755 -t "$root/DEBIAN" deploy/packaging/debian/{postinst,prerm}
    echo /etc/foretoken/foretoken.toml >"$root/DEBIAN/conffiles"
    find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    # With one thread: otherwise the number of cores changes the bytes.
    dpkg-deb --root-owner-group -Zxz --threads-max=1 --build "$root" "$out/foretoken_${version}-1_$architecture.deb"
    rm -r "$root"
}

# In these places they become parts of the wheels: by the pattern of licences in pyproject.toml, and by maturin's folder of data.
trap 'rm -rf LICENSE-THIRD-PARTY foretoken.data' EXIT
licences() { python3 scripts/release/inventory.py licences --target "$1" "${@:2}" >LICENSE-THIRD-PARTY; }

# program TARGET COMPATIBILITY [FLAG...]: sets $program to what is packed, and writes its documents.
program() {
    local target=$1
    program=${ready:-$build/$target/release/foretoken}
    case $target in *-windows-*) [ -n "$ready" ] || program+=.exe ;; esac
    if [ -n "$ready" ]; then
        documents "$program"
    else
        build_wheel "$program" "$@"
    fi
}

make_target() {
    local target=$1 name=foretoken-$version-$1 host program
    host=$(rustc -vV | sed -n 's/^host: //p')
    step "$target"
    case $target in
    *-linux-musl)
        licences "$target"
        program "$target" $MUSL --zig
        archive "$name.tar.gz" "$program"
        if ! command -v dpkg-deb >/dev/null; then
            echo "not made here: the Debian package, without dpkg-deb"
        else
            case $target in
            x86_64-*) debian amd64 "$program" ;;
            aarch64-*) debian arm64 "$program" ;;
            esac
        fi
        ;;
    *-linux-gnu)
        licences "$target"
        program "$target" $GLIBC --zig
        archive "$name.tar.gz" "$program"
        ;;
    *-apple-darwin)
        [[ $host = *-apple-darwin ]] || fail "$target can be built on macOS only"
        licences "$target"
        program "$target" pypi
        archive "$name.tar.gz" "$program"
        ;;
    *-windows-gnu)
        licences "$target"
        program "$target" pypi --zig
        archive "$name.zip" "$program"
        ;;
    cuda)
        if ! command -v nvcc >/dev/null; then
            echo "not made here: the program for CUDA, without nvcc"
            return
        fi
        licences "$host" --features cuda
        # With this machine's C compiler: CUDA's libraries need its C library. The release of CUDA is in the name.
        cargo build --release --locked --target "$host" --features cuda
        documents "$build/$host/release/foretoken"
        archive "foretoken-$version-$host-cuda$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p').tar.gz" \
            "$build/$host/release/foretoken"
        ;;
    *) fail "$target has no recipe here: *-linux-musl, *-linux-gnu, *-apple-darwin, *-windows-gnu, cuda and none have" ;;
    esac
}

if [ "$targets" != none ]; then
    if [ -z "$ready" ]; then
        step "tools"
        install_tools
        maturin --version
    fi
    for target in ${targets//,/ }; do make_target "$target"; done
fi

step "inventory, checksums, packaging"
python3 scripts/release/inventory.py sbom >"$out/foretoken-$version.cdx.json"
python3 scripts/release/packaging.py "$out" --version "$version" --repository "$repository"
cat "$out/SHA256SUMS"
