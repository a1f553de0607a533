#!/usr/bin/env bash
# Makes images under the names of Containerfile's bases for the CPU, for a machine that reaches no container registry:
# base-images.sh FOLDER [FLAG...]    (the FLAGs go to buildah, such as --root and --runroot)
# The image of distroless has the same packages of Debian, unpacked without a package manager; that of rust is a new Debian with a C
# compiler and with this machine's toolchain, which is to have the version that Containerfile names. Then, for example:
#   buildah FLAG... bud --isolation chroot --pull-never -f deploy/Containerfile --target cpu -t foretoken .
# Needs root, Debian or one of its descendants, debootstrap, buildah and rustup.
set -euo pipefail
folder=$(mkdir -p "${1?a folder for the roots}" && realpath "$1")
shift
cd "$(dirname "$0")"
MIRROR=http://deb.debian.org/debian
rust=$(sed -n 's/^FROM \(.*\) AS rust$/\1/p' Containerfile)
distroless=$(sed -n 's/^FROM \(.*\) AS cpu$/\1/p' Containerfile)
version=$(sed 's/.*:\([0-9.]*\)-.*/\1/' <<<"$rust")
debian=${rust##*-}
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
toolchain=$(dirname "$(dirname "$(rustup which rustc)")")
"$toolchain/bin/rustc" --version | grep -F " $version." || { echo "the toolchain is not $version" >&2 && exit 2; }

# new FLAG...: sets $made to a new container without anything in it.
new() { made=$(buildah "$@" from scratch); }

root=$folder/distroless
rm -rf "$root"
mkdir -p "$root"/{etc/ssl/certs,tmp,root,proc,sys,dev} "$folder/debs"
(
    cd "$folder/debs"
    apt-get download base-files ca-certificates gcc-12-base libc6 libgcc-s1 libgomp1 libssl3 libstdc++6 netbase tzdata
    for package in *.deb; do dpkg-deb --extract "$package" "$root"; done
)
find "$root/usr/share/ca-certificates" -name '*.crt' | sort | xargs cat >"$root/etc/ssl/certs/ca-certificates.crt"
printf '%s\n' root:x:0:0::/root:/sbin/nologin nonroot:x:65532:65532::/home/nonroot:/sbin/nologin >"$root/etc/passwd"
printf '%s\n' root:x:0: nonroot:x:65532: >"$root/etc/group"
chmod 1777 "$root/tmp"
mkdir -p "$folder/home"
new "$@"
buildah "$@" add "$made" "$root" /
buildah "$@" add --chown 65532:65532 "$made" "$folder/home" /home/nonroot
buildah "$@" config --user 65532 --workingdir /home/nonroot --env PATH=$path \
    --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$made"
buildah "$@" commit --rm "$made" "$distroless"

root=$folder/rust
[ -x "$root/usr/bin/gcc" ] || debootstrap --variant=minbase --include=ca-certificates,g++,gcc,libc6-dev "$debian" "$root" $MIRROR
copy=$root/usr/local/rustup/toolchains/$version
mkdir -p "$copy/lib/rustlib" "$root/usr/local/cargo"
cp -a "$toolchain/bin" "$copy"
cp -a "$toolchain"/lib/*.so* "$copy/lib"
cp -a "$toolchain/lib/rustlib/$(uname -m)-unknown-linux-gnu" "$copy/lib/rustlib"
# A network may have a proxy with a certificate of its own.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs"
new "$@"
buildah "$@" add "$made" "$root" /
buildah "$@" config --env CARGO_HOME=/usr/local/cargo --env RUSTUP_HOME=/usr/local/rustup \
    --env "PATH=/usr/local/rustup/toolchains/$version/bin:$path" "$made"
buildah "$@" commit --rm "$made" "$rust"
