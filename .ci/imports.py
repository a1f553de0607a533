#!/usr/bin/env python3
"""Checks that no files of a crate import each other, in circles of any length. Cargo checks the crates.

An import is a path that begins with `crate`, `self`, `super` or the name of a child module, in a
`use` or in an expression. Re-exports (`pub use`) are not imports of the file that has them: an
import through them is one of the file that they lead to. What a file takes from the module that it
is a part of (`super`) does not count: a module and its private parts are one unit. Tests are left out.
"""

import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
ROOTS = [TOP / "src", *sorted(TOP.glob("crates/*/src"))]
NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def module_of(root, file):
    """`("model", "hub")` of `model/hub.rs`; `#[path]` is not known here."""
    parts = list(file.relative_to(root).with_suffix("").parts)
    if parts[-1] in ("mod", "lib", "main"):
        binary = parts == ["main"]
        parts.pop()
        return ("main",) if binary else tuple(parts)
    return tuple(parts)


def without(text, opening, closing="}"):
    """`text` without the blocks that begin with the pattern `opening`."""
    while match := re.search(opening, text):
        depth, end = 0, match.end() - 1
        while end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        text = text[: match.start()] + text[end:]
    return text


def cleaned(text):
    text = re.sub(r'b?r(#+)".*?"\1', '""', text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    text = re.sub(r"'(?:\\.|[^'\\])'", "' '", text)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return without(text, r"#\[cfg\(test\)\]\s*(?:pub\s+)?mod\s+\w+\s*\{")


def leaves(tree):
    """All paths of a `use` tree, each with the name it is known by."""
    tree = tree.strip()
    if "{" not in tree:
        path, _, alias = tree.partition(" as ")
        parts = [part.strip() for part in path.split("::") if part.strip()]
        yield parts, alias.strip() or (parts[-1] if parts else "")
        return
    prefix, rest = tree.split("{", 1)
    rest = rest[: rest.rindex("}")]
    head = [part.strip() for part in prefix.split("::") if part.strip()]
    depth, start = 0, 0
    for i, letter in enumerate(rest + ","):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            if rest[start:i].strip():
                for path, name in leaves(rest[start:i]):
                    if path == ["self"]:
                        yield head, head[-1]
                    else:
                        yield head + path, name
            start = i + 1


class Crate:
    def __init__(self, root):
        files = [f for f in root.rglob("*.rs") if "tests" not in f.with_suffix("").parts]
        self.files = {module_of(root, f): f for f in sorted(files)}
        self.text = {module: cleaned(f.read_text()) for module, f in self.files.items()}
        self.exports = {module: self.exports_of(module) for module in self.files}

    def exports_of(self, module):
        found = {}
        for tree in re.findall(r"\bpub(?:\([^)]*\))?\s+use\s+([^;]+);", self.text[module]):
            for path, name in leaves(tree):
                if absolute := self.absolute(module, path):
                    found[name] = absolute
        return found

    def absolute(self, module, path):
        """`path`, as written in `module`, from the crate's root; None if it leads out of it."""
        if not path:
            return None
        first, rest = path[0], path[1:]
        here = () if module == ("main",) else module
        if first in ("crate", "foretoken"):
            return tuple(rest)
        if first == "self":
            return here + tuple(rest)
        if first == "super":
            while path and path[0] == "super":
                here, path = here[:-1], path[1:]
            return here + tuple(path)
        if module + (first,) in self.files:
            return module + tuple(path)
        if module == ("main",) and ("main", first) in self.files:
            return ("main",) + tuple(path)
        return None

    def file_of(self, path, depth=0):
        """The module whose file defines what `path` names."""
        for length in range(len(path), -1, -1):
            module = path[:length]
            if module not in self.files:
                continue
            rest = path[length:]
            if rest and rest[0] in self.exports[module] and depth < 8:
                return self.file_of(self.exports[module][rest[0]] + rest[1:], depth + 1)
            return module
        return None

    def imports(self, module):
        text = self.text[module]
        found = set()
        uses = r"(?m)^[ \t]*(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);"
        paths = []
        for public, tree in re.findall(uses, text):
            if not public:
                paths += [path for path, _ in leaves(tree)]
        text = re.sub(uses, "", text)
        starts = "|".join(["crate", "super", "self"] + [m[-1] for m in self.files if m[:-1] == module and m])
        for path in re.findall(rf"(?<![\w:])((?:{starts})(?:::{NAME})+)", text):
            paths.append(path.split("::"))
        for path in paths:
            target = self.absolute(module, path)
            if target is not None:
                target = self.file_of(target)
            if target is not None and module[: len(target)] != target:
                found.add(target)
        return found


def circles(edges):
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index, low, stack, on, found = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on.add(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                on.discard(component[-1])
                if component[-1] == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def main():
    sys.setrecursionlimit(10_000)
    found, bad = 0, False
    for crate in map(Crate, ROOTS):
        edges = {module: crate.imports(module) for module in crate.files}
        found += sum(map(len, edges.values()))
        for component in circles(edges):
            bad = True
            print("these files import each other:")
            for module in component:
                targets = [crate.files[t].relative_to(TOP) for t in sorted(edges[module]) if t in component]
                print(f"  {crate.files[module].relative_to(TOP)} -> {', '.join(map(str, targets))}")
    if len(ROOTS) < 5 or found < 500:
        sys.exit("imports.py found too little: it no longer understands the sources")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
