"""Rewrite the imports of plugins to `meshwright.plugin`, and write plugin.pyi.

    python surface.py ROOT [RENAMES.json]

RENAMES.json: {"module:Name": "NewName"} for names that would clash or say nothing in a flat namespace (reported).
"""
import ast, json, re, sys, collections
from pathlib import Path
ROOT = Path(sys.argv[1]).resolve(); REN = json.loads(Path(sys.argv[2]).read_text()) if len(sys.argv) > 2 else {}
CORE = ROOT / "core" / "meshwright"
SAME = {"meshwright.checkpoint.export:export_checkpoint": "meshwright.checkpoint:export_checkpoint"}
ALLOWED = {"meshwright", "meshwright.plugin"}
def is_module(dotted):
    p = CORE.joinpath(*dotted.split(".")[1:])
    return p.with_suffix(".py").is_file() or (p / "__init__.py").is_file()
stub_path = CORE / "plugin.pyi"
names = {}  # name -> module
if stub_path.is_file():
    for n in ast.parse(stub_path.read_text()).body:
        if isinstance(n, ast.ImportFrom):
            for a in n.names: names[a.asname or a.name] = ("meshwright." + n.module if n.level else n.module, a.name)
clash = collections.defaultdict(set)
for f in sorted(ROOT.glob("plugins/*/src/**/*.py")):
    text = f.read_text(); tree = ast.parse(text); lines = text.splitlines(keepends=True); edits = []
    for n in ast.walk(tree):
        if not isinstance(n, ast.ImportFrom) or n.level or not (n.module or "").split(".")[0] == "meshwright" or n.module in ALLOWED or n.module.startswith("meshwright.testing"): continue
        out = []
        for a in n.names:
            if is_module(f"{n.module}.{a.name}"):
                print(f"{f.relative_to(ROOT)}:{n.lineno}: imports the module {n.module}.{a.name}"); continue
            key = f"{n.module}:{a.name}"
            module, _, shown = SAME.get(key, key).partition(":")
            public = REN.get(f"{module}:{shown}", shown)
            if names.get(public, (module, shown)) != (module, shown): clash[public] |= {names[public], (module, shown)}
            names.setdefault(public, (module, shown)); asname = a.asname or (a.name if public != a.name else "")
            out.append(public + (f" as {asname}" if asname and asname != public else ""))
        if not out: continue
        ind = " " * n.col_offset
        line = f"{ind}from meshwright.plugin import {', '.join(out)}"
        if len(line) > 120: line = f"{ind}from meshwright.plugin import (\n" + "".join(f"{ind}    {o},\n" for o in out) + f"{ind})"
        edits.append((n.lineno, n.end_lineno, line + lines[n.end_lineno - 1][n.end_col_offset:]))
    for s, e, new in sorted(edits, reverse=True): lines[s - 1:e] = [new]
    if edits: f.write_text("".join(lines))
by = collections.defaultdict(list)
for n, (m, own) in names.items(): by[m].append((own, n))
head = '"""The names of `meshwright.plugin`; each is imported from its module on first use."""\n\n'
body = "".join(f"from .{m.partition('.')[2]} import {own} as {n}\n" for m in sorted(by) for own, n in sorted(by[m]))
stub_path.write_text(head + body)
print(len(names), "names; clashes:", dict(clash))
