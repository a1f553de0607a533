#!/usr/bin/env bash
# Runs each artefact of a release that this machine can run: test-release.sh [DIR]    (default: target/release-artefacts)
# Archives and Debian packages are unpacked into an empty root, with the C library alone where the program is not
# static; wheels for glibc are installed in an empty virtual environment. Each program serves the demonstration model there, and
# answers a request by HTTP, all with the same text. Needs root, for chroot, and python3 with venv. Programs of 64-bit ARM run if
# there is qemu-aarch64-static, those for glibc with that of a cross compiler (libc6-arm64-cross), and those of Windows if there
# is wine.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
artefacts=$(realpath "${1:-target/release-artefacts}")
folder=$(mktemp -d)
chmod 755 "$folder"
cleanup() {
    umount "$folder"/*/proc 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
machine=$(uname -m)
failed=0 passed=0
text='' flags=() end=signal
# What runs a program of another system or processor, and where its libraries are; nothing for this machine's own.
through=() sysroot=''
wrong() { echo "FAILED: $*" && failed=$((failed + 1)); }

# serves NAME PROGRAM...: starts it with $flags, asks for a completion, and ends it by $end.
serves() {
    local name=$1 said first
    shift
    said=$("$@" --version) || true
    [[ $said = "foretoken $version (commit "* ]] || { wrong "$name: --version says $said" && return; }
    said=$(scripts/release/answers.py --end "$end" "$@" serve "${flags[@]}" 2>"$folder/log") \
        || { wrong "$name: $(tail -n 3 "$folder/log")" && return; }
    first=${said%% *} said=${said#* }
    : "${text:=$said}"
    [ "$said" = "$text" ] || { wrong "$name says $said, another artefact $text" && return; }
    echo "$name: $first ms from the command to the whole answer of 24 tokens"
    passed=$((passed + 1))
}

# libraries PROGRAM: the paths of those that it loads; nothing of a static one.
libraries() {
    if [ ${#through[@]} != 0 ]; then
        # Of another processor, so it is not loaded here.
        LC_ALL=C readelf -dl "$1" | sed -n -e 's|.*(NEEDED).*\[\(.*\)\]$|/lib/\1|p' -e 's|.*program interpreter: \(.*\)\]$|\1|p'
    elif ldd "$1" >"$folder/libraries" 2>&1; then
        # ldd knows static programs that may be loaded anywhere, and names no library of theirs.
        grep -o '/[^ ]*' "$folder/libraries" || true
    fi
}

# in_root NAME ROOT PROGRAM: serves from ROOT as a user who can write nothing.
in_root() {
    local name=$1 root=$2 program=$3 library
    mkdir -p "$root/proc"
    while read -r library; do
        case $(basename "$library") in
        libc.so* | libm.so* | libdl.so* | libpthread.so* | librt.so* | ld-linux*)
            install -D "$sysroot$library" "$root$library"
            ;;
        *) echo "$name needs $library, which a machine may lack" ;;
        esac
    done < <(libraries "$root$program")
    [ ${#through[@]} = 0 ] || install -D "${through[0]}" "$root${through[0]}"
    mount -t proc proc "$root/proc"
    serves "$name" env -i HF_HOME=/models "$(command -v chroot)" --userspec=65532:65532 "$root" "${through[@]}" "$program"
    umount "$root/proc"
}

# documented NAME PROGRAM SHARE: SHARE has the completions and manual pages of the program.
documented() {
    local name=$1 program=("${through[@]}" "$2") share=$3
    cmp -s <("${program[@]}" completions bash) "$share/bash-completion/completions/foretoken" || wrong "$name: completions for bash"
    cmp -s <("${program[@]}" completions fish) "$share/fish/vendor_completions.d/foretoken.fish" || wrong "$name: completions for fish"
    cmp -s <("${program[@]}" completions zsh) "$share"/zsh/*/_foretoken || wrong "$name: completions for zsh"
    # gzip passes on what is not compressed.
    cmp -s <("${program[@]}" man) <(gzip -cdf "$share"/man/man1/foretoken.1*) || wrong "$name: the manual page"
    cmp -s <("${program[@]}" man serve) <(gzip -cdf "$share"/man/man1/foretoken-serve.1*) || wrong "$name: the manual page of serve"
}

# complete NAME FOLDER: the folder of an archive has what belongs to a program.
complete() {
    local name=$1 file
    for file in README.md CHANGELOG.md LICENSE LICENSE-APACHE LICENSE-MIT LICENSE-THIRD-PARTY; do
        [ -s "$2/$file" ] || wrong "$name lacks $file"
    done
}

# unpacked_wheel: serves the program of a wheel, without pip.
unpacked_wheel() {
    python3 -m zipfile -e "$artefact" "$root"
    install -m 755 "$root/foretoken-$version.data/scripts/foretoken" "$root/foretoken"
    documented "$name" "$root/foretoken" "$root/foretoken-$version.data/data/share"
    in_root "$name" "$root" /foretoken
}

# target_of NAME: the target of an artefact, or nothing.
target_of() {
    local target=${1#"foretoken-$version-"}
    case $1 in
    *-cuda*) ;;
    *.tar.gz | *.zip) target=${target%.tar.gz} && echo "${target%.zip}" ;;
    *_amd64.deb) echo x86_64-unknown-linux-musl ;;
    *_arm64.deb) echo aarch64-unknown-linux-musl ;;
    *-win_amd64.whl) echo x86_64-pc-windows-gnu ;;
    *musllinux*.whl) [[ $1 =~ _(x86_64|aarch64)\.whl ]] && echo "${BASH_REMATCH[1]}-unknown-linux-musl" ;;
    *manylinux*.whl) [[ $1 =~ _(x86_64|aarch64)\.whl ]] && echo "${BASH_REMATCH[1]}-unknown-linux-gnu" ;;
    esac
}

# runs TARGET: whether its programs run here, with $through in front of them, and what ends them.
runs() {
    local by
    through=() end=signal sysroot=''
    case $1 in
    "$machine"-unknown-linux-*) ;;
    aarch64-unknown-linux-musl) by=$(command -v qemu-aarch64-static) && through=("$by") ;;
    aarch64-unknown-linux-gnu)
        # In a root the loader is where the program looks for it; outside, it is where -L says.
        sysroot=/usr/aarch64-linux-gnu
        by=$(command -v qemu-aarch64-static) && [ -e "$sysroot/lib/libc.so.6" ] && through=("$by" -L "$sysroot")
        ;;
    x86_64-pc-windows-gnu) by=$(command -v wine) && through=("$by") end=stdin ;;
    *) false ;;
    esac
}

export WINEPREFIX=$folder/wine WINEDEBUG=-all
(cd "$artefacts" && sha256sum --quiet --check SHA256SUMS) || wrong "SHA256SUMS"
for artefact in "$artefacts"/*; do
    name=$(basename "$artefact")
    root=$folder/$name
    case $name in *.tar.gz | *.zip | *.deb | *.whl) ;; *) continue ;; esac
    if ! runs "$(target_of "$name")"; then
        echo "not run here: $name"
        continue
    fi
    case $name in
    *.tar.gz)
        mkdir "$root"
        tar -xzf "$artefact" -C "$root" --strip-components=1
        complete "$name" "$root"
        documented "$name" "$root/foretoken" "$root/share"
        in_root "$name" "$root" /foretoken
        ;;
    *.zip)
        python3 -m zipfile -e "$artefact" "$root"
        root+=/${name%.zip}
        complete "$name" "$root"
        documented "$name" "$root/foretoken.exe" "$root/share"
        serves "$name" "${through[@]}" "$root/foretoken.exe"
        ;;
    *.deb)
        mkdir "$root"
        dpkg-deb --extract "$artefact" "$root"
        unit=$root/usr/lib/systemd/system/foretoken.service
        grep -qx 'ExecStart=/usr/bin/foretoken serve --config /etc/foretoken/foretoken.toml' "$unit" || wrong "$name: its unit"
        cmp -s <(sed -n '/^\[Unit\]$/,$s|/usr/local/bin/|/usr/bin/|;/^\[Unit\]$/,$p' deploy/systemd/foretoken.service) "$unit" \
            || wrong "$name: its unit has more or less than the sections of that in deploy/systemd"
        [ -s "$root/etc/foretoken/foretoken.toml" ] || wrong "$name: its configuration"
        documented "$name" "$root/usr/bin/foretoken" "$root/usr/share"
        [ -s "$root/usr/share/zsh/vendor-completions/_foretoken" ] || wrong "$name: the place of the completions for zsh"
        flags=(--config /etc/foretoken/foretoken.toml)
        in_root "$name" "$root" /usr/bin/foretoken
        flags=()
        ;;
    *musllinux*.whl)
        # pip installs it only where the C library is musl.
        unpacked_wheel
        ;;
    *-win_amd64.whl)
        python3 -m zipfile -e "$artefact" "$root"
        root+=/foretoken-$version.data
        documented "$name" "$root/scripts/foretoken.exe" "$root/data/share"
        serves "$name" "${through[@]}" "$root/scripts/foretoken.exe"
        ;;
    *manylinux*_"$machine".whl)
        python3 -m venv "$root"
        "$root/bin/pip" install --quiet --no-index --disable-pip-version-check "$artefact"
        documented "$name" "$root/bin/foretoken" "$root/share"
        serves "$name" "$root/bin/foretoken"
        ;;
    *manylinux*.whl)
        # Nor does pip install that of another processor.
        unpacked_wheel
        ;;
    esac
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
