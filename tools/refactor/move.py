"""Move modules and names: rewrite every import, dotted string and path in the repository.

    python move.py ROOT MAPPING.json

MAPPING.json: {"modules": {"old.module": "new.module"}, "names": {"old.module:Name": "new.module"}}
A file whose module is in "modules" is moved (git mv) when the new file does not exist yet; when it exists (two modules
merged by hand), only imports are rewritten. Packages (folders) may be given too: all modules below move along.
"""
from __future__ import annotations
import ast, json, re, subprocess, sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
SPEC = json.loads(Path(sys.argv[2]).read_text())
PACKAGES = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else {}


def sources() -> dict[str, Path]:
    found = {"meshwright": ROOT / "core" / "meshwright"}
    for p in (ROOT / "plugins").glob("*/src/*"):
        if (p / "__init__.py").is_file():
            found[p.name] = p
    for name, path in PACKAGES.items():
        found[name] = ROOT / path
    return found


PK = sources()


def path_of(module: str, package: bool = False) -> Path:
    top, *rest = module.split(".")
    base = PK[top].joinpath(*rest)
    return base / "__init__.py" if package else base.with_name(base.name + ".py")


def module_of(path: Path) -> str | None:
    for top, base in PK.items():
        if base in path.parents:
            parts = list(path.relative_to(base).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            return ".".join([top, *parts])
    return None


def tracked(*suffixes: str) -> list[Path]:
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / o for o in out if o and (ROOT / o).is_file() and o.endswith(suffixes)]


all_modules = {}
for f in tracked(".py"):
    m = module_of(f)
    if m:
        all_modules[m] = f

modules: dict[str, str] = {}
for old, new in SPEC.get("modules", {}).items():
    for m in list(all_modules):
        if m == old or m.startswith(old + "."):
            modules.setdefault(m, new + m[len(old):])
    modules.setdefault(old, new)  # gone already
for old, new in SPEC.get("modules", {}).items():  # exact entries win over those of folders
    modules[old] = new
names: dict[tuple[str, str], str] = {}
for k, v in SPEC.get("names", {}).items():
    m, n = k.split(":")
    names[m, n] = v


def new_module(m: str) -> str:
    return modules.get(m, m)


def relative(target: str, here: str, is_package: bool) -> str:
    """How `here` (new module name) writes `target`."""
    pkg = here.split(".") if is_package else here.split(".")[:-1]
    t = target.split(".")
    if t[0] != here.split(".")[0]:
        return target
    common = 0
    while common < min(len(pkg), len(t)) and pkg[common] == t[common]:
        common += 1
    return "." * (len(pkg) - common + 1) + ".".join(t[common:])


def rewrite(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    old_name = module_of(path)
    is_package = path.name == "__init__.py"
    here = new_module(old_name) if old_name else None
    try:
        tree = ast.parse(text)
    except SyntaxError:
        print("syntax error, left:", path); return False
    lines = text.splitlines(keepends=True)
    edits = []
    moved = here != old_name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                if old_name is None:
                    continue
                pkg = old_name.split(".") if is_package else old_name.split(".")[:-1]
                pkg = pkg[: len(pkg) - node.level + 1]
                full = ".".join(pkg + ([node.module] if node.module else []))
            else:
                full = node.module or ""
            if full.split(".")[0] not in PK:
                continue
            groups: dict[str, list[str]] = {}
            changed = False
            for a in node.names:
                sub = f"{full}.{a.name}"
                if (sub in modules and modules[sub] != sub) or (moved and sub in all_modules):
                    t = new_module(sub)
                    parent, _, leaf = t.rpartition(".")
                    asname = a.asname or (a.name if leaf != a.name else None)
                    groups.setdefault(parent, []).append(leaf + (f" as {asname}" if asname else ""))
                    changed = True
                    if asname and asname != leaf and a.asname is None:
                        print(f"{path.relative_to(ROOT)}:{node.lineno}: {sub} imported as a module, now '{leaf} as {asname}'")
                else:
                    t = names.get((full, a.name), new_module(full))
                    if t != full:
                        changed = True
                    groups.setdefault(t, []).append(a.name + (f" as {a.asname}" if a.asname else ""))
            if not changed and not (moved and node.level):
                continue
            indent = " " * node.col_offset
            out = []
            for t, ns in groups.items():
                if here is not None and node.level:
                    shown = relative(t, here, is_package)
                elif here is not None and t.split(".")[0] == here.split(".")[0] and node.level:
                    shown = relative(t, here, is_package)
                else:
                    shown = t
                if here is not None and t == here:
                    continue  # its own name now
                line = f"{indent}from {shown} import {', '.join(ns)}"
                if len(line) > 120:
                    line = f"{indent}from {shown} import (\n" + "".join(f"{indent}    {n},\n" for n in ns) + f"{indent})"
                out.append(line)
            tail = lines[node.end_lineno - 1][node.end_col_offset:]
            new_text = "\n".join(out) if out else f"{indent}pass"
            edits.append((node.lineno, node.end_lineno, new_text + tail if tail.strip() else new_text + "\n"))
    for start, end, new in sorted(edits, reverse=True):
        if new.strip() == "pass" and not lines[start - 1][: 1].isspace():
            new = ""
        lines[start - 1 : end] = [new]
    result = "".join(lines)
    if result != text:
        path.write_text(result, encoding="utf-8")
        return True
    return False


count = sum(rewrite(f) for f in tracked(".py", ".pyi"))
# dotted names and paths in any text
pairs = []
for old, new in modules.items():
    if old != new:
        pairs.append((re.compile(rf"(?<![\w.]){re.escape(old)}(?!\w)"), new))
        try:
            po = path_of(old).relative_to(ROOT).as_posix(); pn = path_of(new).relative_to(ROOT).as_posix()
            pairs.append((re.compile(re.escape(po)), pn))
        except KeyError:
            pass
for (m, n), new in names.items():
    pairs.append((re.compile(rf"(?<![\w.]){re.escape(m)}([.:]){re.escape(n)}(?!\w)"), rf"{new}\g<1>{n}"))
if pairs:
    quick = re.compile("|".join(sorted({re.escape(o.rpartition('.')[2]) for o in modules if o != modules[o]} | {n for _, n in names} | {"(?!)"}, key=len, reverse=True)))
    for f in tracked(".py", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".txt", ".svg", ".html"):
        if f.stat().st_size > 3_000_000 or "/results/" in f.as_posix() or f.name == "CHANGELOG.md":
            continue
        text = f.read_text(encoding="utf-8", errors="surrogateescape")
        if not quick.search(text):
            continue
        new = text
        for pattern, to in sorted(pairs, key=lambda p: -len(p[0].pattern)):
            new = pattern.sub(to, new)
        if new != text:
            f.write_text(new, encoding="utf-8", errors="surrogateescape"); count += 1
moved = 0
for old, new in modules.items():
    src = all_modules.get(old)
    if src is None or not src.is_file() or old == new:
        continue
    top, *rest = new.split(".")
    dst = PK[top].joinpath(*rest) / "__init__.py" if src.name == "__init__.py" else path_of(new)
    if dst.exists():
        print("exists, not moved:", old, "->", new); continue
    dst.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", str(src), str(dst)], cwd=ROOT, check=True); moved += 1
print(f"{count} files rewritten, {moved} moved")
