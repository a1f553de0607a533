#!/usr/bin/env bash
# Runs each artefact of a release that this machine can run: test-release.sh [DIR]    (default: target/release-artefacts)
# Archives and Debian packages are unpacked into an empty root, with the C library alone where the program is not
# static; wheels for glibc are installed in an empty virtual environment. Each program serves the demonstration model there, and
# answers a request by HTTP, all with the same text. Needs root, for chroot; curl, and python3 with venv.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
artefacts=$(realpath "${1:-target/release-artefacts}")
folder=$(mktemp -d)
chmod 755 "$folder"
server=
cleanup() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    umount "$folder"/*/proc 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
machine=$(uname -m)
failed=0 passed=0
text='' flags=()
wrong() { echo "FAILED: $*" && failed=$((failed + 1)); }

# serves NAME PROGRAM...: starts it with $flags on a free port, asks for a completion, and ends it.
serves() {
    local name=$1 url said start first log=$folder/log
    shift
    said=$("$@" --version) || true
    [[ $said = "foretoken $version (commit "* ]] || { wrong "$name: --version says $said" && return; }
    # Empty before the server begins to write: the address of the one before is no answer.
    : >"$log"
    start=$(date +%s%N)
    "$@" serve --host 127.0.0.1 --port 0 --threads 2 "${flags[@]}" >"$log" 2>&1 &
    server=$!
    until url=$(grep -o 'http://127[0-9.:]*' "$log" | tail -n 1) && [ -n "$url" ]; do
        if ! kill -0 $server 2>/dev/null || [ $(($(date +%s%N) - start)) -gt 120000000000 ]; then
            kill -KILL $server 2>/dev/null || true
            wait $server || true
            server=
            wrong "$name does not serve: $(tail -n 3 "$log")" && return
        fi
        sleep 0.05
    done
    said=$(curl -sf -m 120 "$url/v1/completions" -H 'Content-Type: application/json' \
        -d '{"model": "foretoken-demo", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}' \
        | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"][0]["text"]))' 2>/dev/null) || said=
    first=$((($(date +%s%N) - start) / 1000000))
    kill -TERM $server
    wait $server || wrong "$name ended with status $?"
    server=
    [ -n "$said" ] && [ "$said" != '""' ] || { wrong "$name gave no completion" && return; }
    : "${text:=$said}"
    [ "$said" = "$text" ] || { wrong "$name says $said, another artefact $text" && return; }
    echo "$name: $first ms from the command to the whole answer of 24 tokens"
    passed=$((passed + 1))
}

# in_root NAME ROOT PROGRAM: serves from ROOT as a user who can write nothing.
in_root() {
    local name=$1 root=$2 program=$3 library
    mkdir -p "$root/proc"
    if ldd "$root$program" >"$folder/libraries" 2>&1; then
        grep -o '/[^ ]*' "$folder/libraries" | while read -r library; do
            case $(basename "$library") in
            libc.so* | libm.so* | libdl.so* | libpthread.so* | librt.so* | ld-linux*)
                install -D "$library" "$root$library"
                ;;
            *) echo "$name needs $library, which a machine may lack" ;;
            esac
        done
    fi
    mount -t proc proc "$root/proc"
    serves "$name" env -i HF_HOME=/models "$(command -v chroot)" --userspec=65532:65532 "$root" "$program"
    umount "$root/proc"
}

# documented NAME PROGRAM SHARE: SHARE has the completions and manual pages of the program.
documented() {
    local name=$1 program=$2 share=$3
    cmp -s <("$program" completions bash) "$share/bash-completion/completions/foretoken" || wrong "$name: completions for bash"
    cmp -s <("$program" completions fish) "$share/fish/vendor_completions.d/foretoken.fish" || wrong "$name: completions for fish"
    cmp -s <("$program" completions zsh) "$share"/zsh/*/_foretoken || wrong "$name: completions for zsh"
    # gzip passes on what is not compressed.
    cmp -s <("$program" man) <(gzip -cdf "$share"/man/man1/foretoken.1*) || wrong "$name: the manual page"
    cmp -s <("$program" man serve) <(gzip -cdf "$share"/man/man1/foretoken-serve.1*) || wrong "$name: the manual page of serve"
}

(cd "$artefacts" && sha256sum --quiet --check SHA256SUMS) || wrong "SHA256SUMS"
for artefact in "$artefacts"/*; do
    name=$(basename "$artefact")
    root=$folder/$name
    case $name in
    *-cuda*) echo "not run here: $name" ;;
    foretoken-*-"$machine"-unknown-linux-*.tar.gz)
        mkdir "$root"
        tar -xzf "$artefact" -C "$root" --strip-components=1
        for file in README.md CHANGELOG.md LICENSE LICENSE-APACHE LICENSE-MIT LICENSE-THIRD-PARTY; do
            [ -s "$root/$file" ] || wrong "$name lacks $file"
        done
        documented "$name" "$root/foretoken" "$root/share"
        in_root "$name" "$root" /foretoken
        ;;
    foretoken_*.deb)
        if [ "$(dpkg-deb --field "$artefact" Architecture)" != "$(dpkg --print-architecture)" ]; then
            echo "not run here: $name"
            continue
        fi
        mkdir "$root"
        dpkg-deb --extract "$artefact" "$root"
        unit=$root/usr/lib/systemd/system/foretoken.service
        grep -qx 'ExecStart=/usr/bin/foretoken serve --config /etc/foretoken/foretoken.toml' "$unit" || wrong "$name: its unit"
        [ -s "$root/etc/foretoken/foretoken.toml" ] || wrong "$name: its configuration"
        documented "$name" "$root/usr/bin/foretoken" "$root/usr/share"
        [ -s "$root/usr/share/zsh/vendor-completions/_foretoken" ] || wrong "$name: the place of the completions for zsh"
        flags=(--config /etc/foretoken/foretoken.toml)
        in_root "$name" "$root" /usr/bin/foretoken
        flags=()
        ;;
    foretoken-*musllinux*"_$machine.whl")
        # pip installs it only where the C library is musl.
        mkdir "$root"
        python3 -m zipfile -e "$artefact" "$root"
        install -m 755 "$root/foretoken-$version.data/scripts/foretoken" "$root/foretoken"
        documented "$name" "$root/foretoken" "$root/foretoken-$version.data/data/share"
        in_root "$name" "$root" /foretoken
        ;;
    foretoken-*manylinux*"_$machine.whl")
        python3 -m venv "$root"
        "$root/bin/pip" install --quiet --no-index --disable-pip-version-check "$artefact"
        documented "$name" "$root/bin/foretoken" "$root/share"
        serves "$name" "$root/bin/foretoken"
        ;;
    *.tar.gz | *.whl | *.zip) echo "not run here: $name" ;;
    esac
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
