#!/usr/bin/env python3
"""Packs files into a folder of a .tar.gz or .zip whose bytes depend on nothing but them: pack.py ARCHIVE TIME FILE...

The folder has the archive's name. The first file is the program, which stays executable and is called foretoken, with
its suffix. Of a FILE that is a folder, all files are packed under its name. All files get the TIME, in seconds since 1970.
"""

import gzip
import io
import sys
import tarfile
import time
import zipfile
from pathlib import Path


def tar(archive, folder, files, seconds):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as into:
        for name, content, mode in files:
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), mode, seconds
            into.addfile(entry, io.BytesIO(content))
    with open(archive, "wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as compressed:
        compressed.write(packed.getvalue())


def pack_zip(archive, folder, files, seconds):
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as into:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(f"{folder}/{name}", time.gmtime(seconds)[:6])
            entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, 3, (0o100000 | mode) << 16
            into.writestr(entry, content)


def main():
    archive, seconds, *paths = sys.argv[1:]
    program, *others = map(Path, paths)
    files = [(f"foretoken{program.suffix}", program.read_bytes(), 0o755)]
    for path in others:
        inside = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        files += [(file.relative_to(path.parent).as_posix(), file.read_bytes(), 0o644) for file in inside]
    files.sort()
    for suffix, pack in ((".tar.gz", tar), (".zip", pack_zip)):
        if archive.endswith(suffix):
            pack(archive, Path(archive).name.removesuffix(suffix), files, int(seconds))
            print(f"{archive}: {Path(archive).stat().st_size:,} bytes")
            return
    sys.exit(f"pack.py: {archive} is neither a .tar.gz nor a .zip")


if __name__ == "__main__":
    main()
