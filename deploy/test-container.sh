#!/usr/bin/env bash
# What of deploy/Containerfile can be tried without a container engine: test-container.sh FORETOKEN
# - cargo finds everything that it needs in the files that the image copies;
# - the program runs with what the base image has (the C and C++ runtime and certificates), as its user, on a root that
#   nothing can be written to. Needs root, for chroot.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=$(realpath "$1")
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill $server 2>/dev/null; umount "$folder/root/proc" 2>/dev/null || true; rm -rf "$folder"' EXIT

mkdir "$folder/build"
sed -n '/AS source$/,/^$/s/^COPY //p' deploy/Containerfile | while read -r line; do
    set -- $line
    to=$folder/build/${!#}
    if [ $# = 2 ] && [ -d "$1" ]; then mkdir -p "$to"; cp -r "$1/." "$to"; else cp "${@:1:$#-1}" "$to"; fi
done
(cd "$folder/build" && cargo metadata --locked --offline --format-version 1 >"$folder/metadata.json")
# Only what builds looks for the sources of all targets; this builds none, for there is no such target.
said=$(cd "$folder/build" && cargo bench --locked --offline --no-run --bench none 2>&1) || true
[[ $said = *"no bench target named"* ]] || { echo "$said" && exit 1; }
# Each target of the package has its source there, but for tests, which the image does not build.
python3 - "$folder" <<'PYTHON'
import json, os, re, sys
package = next(p for p in json.load(open(sys.argv[1] + "/metadata.json"))["packages"] if p["name"] == "foretoken")
for target in package["targets"]:
    if target["kind"] != ["test"]:
        assert os.path.exists(target["src_path"]), target["src_path"]
        print("source:", target["kind"][0], target["name"])
root = sys.argv[1] + "/build/"
walks = [entry for part in ("src", "crates") for entry in os.walk(root + part)]
for folder, _, files in walks:
    for name in files:
        # Tests are not compiled there.
        if not name.endswith(".rs") or name == "tests.rs" or "tests" in folder.split("/"):
            continue
        path = os.path.join(folder, name)
        for included in re.findall(r'include_(?:str|bytes)!\(\s*"([^"]+)"', open(path).read()):
            assert os.path.exists(os.path.join(folder, included)), f"{path} includes {included}, which is not copied"
print("source: every included file is copied")
PYTHON

mkdir -p "$folder/root"/{proc,tmp,usr/local/bin}
cp "$binary" "$folder/root/usr/local/bin/foretoken"
ldd "$binary" | grep -o '/[^ ]*' | while read -r library; do
    case $(basename "$library") in
    libc.so* | libm.so* | libdl.so* | libpthread.so* | librt.so* | libgcc_s.so* | libstdc++.so* | ld-linux*) ;;
    *) echo "$library is not in the base image" && exit 1 ;;
    esac
    mkdir -p "$folder/root/$(dirname "$library")"
    cp -L "$library" "$folder/root/$library"
done
mount -t proc proc "$folder/root/proc"
chmod 755 "$folder"
as_user=(env HF_HOME=/models chroot --userspec=65532:65532 "$folder/root" /usr/local/bin/foretoken)
"${as_user[@]}" --version
"${as_user[@]}" --host 127.0.0.1 --port 0 --threads 1 --num-blocks 256 >"$folder/log" 2>&1 &
server=$!
until url=$(grep -o 'http://[0-9.:]*' "$folder/log" | tail -n 1) && [ -n "$url" ]; do kill -0 $server && sleep 0.2; done
[ "$(stat -c %u /proc/$server)" = 65532 ]
curl -sf "$url/health" && echo
kill -TERM $server
wait $server
server=
echo "ended with status 0"
