"""Rename members by mypy's types: `python3.12 members.py TABLE... [--dry]`, from the repository's root, after apply.py.

One mypy run gives the type before each dot; a member is renamed where the class that defines it is in the table, in the
whole hierarchy that shares it. Needs mypy in a Python 3.12 environment; `.venv` holds the project.
"""

# ruff: noqa
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import apply as A
from mypy import build, nodes, types as T
from mypy.fscache import FileSystemCache
from mypy.main import process_options
from mypy.modulefinder import BuildSource
from mypy.traverser import ExtendedTraverserVisitor

FUNCTION = A.FUNCTION


def main():
    rows = []
    for p in [a for a in sys.argv[1:] if not a.startswith("--")]:
        for l in open(p):
            r = l.rstrip("\n").split("\t")
            if len(r) == 4 and not l.startswith("#"):
                rows.append(r)
    project = A.Project()
    new_name = {(f, q): n for k, f, q, n in rows if k in ("class", "exception", "function")}
    wanted = {}  # (path, class name) -> {old: new}
    for kind, file, qual, new in rows:
        if (
            kind not in ("method", "attribute", "constant", "field", "function", "variable")
            or "." not in qual
            or "(" in qual
        ):
            continue
        cls, old = qual.rsplit(".", 1)
        if old == new or file not in project.files:
            continue
        f = project.files[file]
        parts = cls.split(".")
        for names in ([new_name.get((file, ".".join(parts[: i + 1])), p) for i, p in enumerate(parts)], parts):
            node = A.find_def(f.tree.body, names)
            if isinstance(node, ast.ClassDef):
                if old in A.class_names(node):
                    wanted.setdefault((file, ".".join(names)), {})[old] = new
                break
    print("wanted", sum(map(len, wanted.values())))
    files = sorted(project.files)
    roots = [
        "core",
        *sorted(str(p) for p in Path("plugins").glob("*/src")),
        *sorted(str(p) for p in Path("examples").glob("*/src")),
        "tests",
        "benchmarks",
    ]
    args = [
        "--config-file",
        "pyproject.toml",
        "--python-executable",
        ".venv/bin/python",
        "--no-incremental",
        "core/meshwright/__init__.py",
    ]
    import os

    os.environ["MYPYPATH"] = ":".join(roots)
    _, options = process_options(args)
    options.export_types = options.preserve_asts = True
    options.incremental = False
    options.check_untyped_defs = True
    options.namespace_packages = True
    options.explicit_package_bases = True
    seen, sources = set(), []
    for p in files:
        if p.startswith(("tools/renames",)):
            continue
        m = p if not p.startswith(("tests/", "benchmarks/")) else p.split("/", 1)[1]
        m = A.module_name(m)
        if p.endswith(".py") and Path(p + "i").exists():
            m = "impl__" + m.replace(".", "_")
        if m in seen or not re.fullmatch(r"[\w.]+", m):
            m = "dup__" + re.sub(r"\W", "_", p)
        seen.add(m)
        sources.append(BuildSource(p, m))
    result = build.build(sources, options, fscache=FileSystemCache())
    print("errors", len(result.errors), result.errors[:3])
    types = result.types
    infos = {}  # fullname -> (path, qual)
    by_path = {}
    for name, tree in result.files.items():
        path = tree.path
        if path not in project.files:
            continue
        by_path[path] = tree

        def collect(names, prefix):
            for k, s in names.items():
                if (
                    isinstance(s.node, nodes.TypeInfo)
                    and s.node.module_name == tree.fullname
                    and s.node.fullname not in infos
                ):
                    qual = s.node.fullname[len(tree.fullname) + 1 :]
                    infos[s.node.fullname] = (path, qual, s.node)
                    collect(s.node.names, qual)

        collect(tree.names, "")

    class Locals(ExtendedTraverserVisitor):
        def visit_class_def(self, o):
            if o.info and o.info.fullname not in infos:
                infos[o.info.fullname] = (self.path, o.name, o.info)
            super().visit_class_def(o)

    for path, tree in by_path.items():
        v = Locals()
        v.path = path
        tree.accept(v)
    # (path, line) of class def -> info
    at = {}
    for full, (path, qual, info) in infos.items():
        at[(path, info.defn.line)] = info
        at[(path, qual)] = info
    own = {}  # info fullname -> set of names it defines (by ast)
    nodes_of = {}
    for path in by_path:
        for n in ast.walk(project.files[path].tree):
            if isinstance(n, ast.ClassDef):
                info = None
                for line in [n.lineno, *[d.lineno for d in n.decorator_list]]:
                    info = info or at.get((path, line))
                if info is not None:
                    own[info.fullname] = A.class_names(n)
                    nodes_of[info.fullname] = (path, n)
    ours = {f: i for f, (p, q, i) in infos.items()}
    # components: by name, link classes with mro
    by_member = defaultdict(set)
    for full, names in own.items():
        for m in names:
            by_member[m].add(full)
    rename = {}  # (fullname, old) -> new
    asked = {}
    for (path, qual), d in wanted.items():
        info = at.get((path, qual)) or next(
            (i for f, i in ours.items() if infos[f][0] == path and f.endswith("." + qual.split(".")[-1])), None
        )
        if info is None:
            print("NOINFO", path, qual)
            continue
        for old, new in d.items():
            asked[(info.fullname, old)] = new
    for old in {o for _, o in asked}:
        members = by_member[old]
        link = {m: m for m in members}

        def root(x):
            while link[x] != x:
                x = link[x]
            return x

        for c, i in ours.items():
            line = [b.fullname for b in i.mro if b.fullname in members]
            for a, b in zip(line, line[1:]):
                link[root(a)] = root(b)
        groups = defaultdict(set)
        for m in members:
            groups[root(m)].add(m)
        for g in groups.values():
            news = {asked[(m, old)] for m in g if (m, old) in asked}
            if not news:
                continue
            if len(news) > 1:
                tops = sorted(g, key=lambda m: len(ours[m].mro))
                new = next(asked[(m, old)] for m in tops if (m, old) in asked)
                print("CONFLICT", old, sorted(g), sorted(news), "->", new)
            else:
                new = news.pop()
            external = [
                b.fullname
                for m in g
                for b in ours[m].mro
                if b.fullname not in ours and old in b.names and b.fullname != "builtins.object"
            ]
            if external:
                print("EXTERNAL", old, new, sorted(g)[:3], external[:2])
                continue
            clash = [
                m
                for m in g
                for b in [ours[m]]
                if any(new in own.get(x.fullname, ()) and (x.fullname, new) not in asked for x in b.mro)
            ]
            if clash:
                print("CLASH", old, new, clash)
                continue
            for m in g:
                rename[(m, old)] = new
    print("renamed members", len(rename))
    for c, i in ours.items():
        to = defaultdict(set)
        for b in i.mro:
            for m in own.get(b.fullname, ()):
                to[rename.get((b.fullname, m), m)].add(m)
        for new, old in to.items():
            if len(old) > 1:
                print("TWO", c, new, old)
    olds = {o for _, o in rename}

    def new_of(info, name):
        for b in info.mro:
            if (b.fullname, name) in rename:
                return rename[(b.fullname, name)]
            if name in own.get(b.fullname, ()) or (b.fullname not in ours and name in b.names):
                return name
        # defined by a subclass only (mixins): any subclass
        return None

    def instances(t, depth=0):
        """Infos that a type may be; None where unknown."""
        t = T.get_proper_type(t)
        if isinstance(t, T.Instance):
            return [t.type]
        if isinstance(t, T.UnionType):
            out = []
            for i in t.items:
                r = instances(i)
                if r is None:
                    return None
                out += r
            return out
        if isinstance(t, T.TypeVarType):
            return instances(t.upper_bound)
        if isinstance(t, T.TupleType):
            return [t.partial_fallback.type]
        if isinstance(t, T.TypeType):
            return instances(t.item)
        if isinstance(t, (T.FunctionLike,)) and t.is_type_obj():
            return [t.type_object()]
        if isinstance(t, (T.NoneType, T.UninhabitedType, T.FunctionLike)):
            return []
        if isinstance(t, T.LiteralType):
            return [t.fallback.type]
        return None

    unknown = defaultdict(list)
    edits = 0

    def decide(path, line, infos_, name):
        if infos_ is None:
            unknown[name].append((path, line))
            return None
        news = {new_of(i, name) for i in infos_} - {None}
        if len(news) > 1:
            print("MIXED", path, line, name, news)
            news -= {name}
        if not news:
            if infos_ and any(i.fullname in ours for i in infos_):
                unknown[name].append((path, line))
            return None
        n = news.pop()
        return None if n == name else n

    class Uses(ExtendedTraverserVisitor):
        def __init__(self, f):
            self.f = f
            self.classes = []
            self.calls = {}
            for n in ast.walk(f.tree):
                if isinstance(n, ast.Call):
                    self.calls[(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset)] = n
            self.done = set()

        def visit_class_def(self, o):
            self.classes.append(o.info)
            super().visit_class_def(o)
            self.classes.pop()

        def put(self, line, endcol, name, new):
            c = self.f.col(line, endcol) - len(name)
            self.f.edit(line, c, name, new)

        def visit_member_expr(self, o):
            super().visit_member_expr(o)
            if o.name in olds and id(o) not in self.done:
                self.done.add(id(o))
                if isinstance(o.expr, nodes.RefExpr) and isinstance(o.expr.node, nodes.MypyFile):
                    return
                t = types.get(o.expr)
                if t is None and isinstance(o.expr, nodes.RefExpr) and isinstance(o.expr.node, nodes.TypeInfo):
                    found = [o.expr.node]
                elif t is None:
                    if isinstance(o.expr, nodes.NameExpr) and o.expr.name in ("self", "cls") and self.classes:
                        found = [self.classes[-1]]
                    else:
                        found = None
                else:
                    found = instances(t)
                    if (
                        isinstance(o.expr, nodes.NameExpr)
                        and o.expr.name in ("self", "cls")
                        and self.classes
                        and (not found)
                    ):
                        found = [self.classes[-1]]
                new = decide(self.f.path, o.end_line, found, o.name)
                if new:
                    self.put(o.end_line, o.end_column, o.name, new)

        def visit_super_expr(self, o):
            super().visit_super_expr(o)
            if o.name in olds and self.classes:
                mro = self.classes[-1].mro[1:]
                for b in mro:
                    if (b.fullname, o.name) in rename:
                        self.put(o.end_line, o.end_column, o.name, rename[(b.fullname, o.name)])
                        break

        def visit_call_expr(self, o):
            super().visit_call_expr(o)
            node = self.calls.get((o.line, o.column, o.end_line, o.end_column))
            if node is None:
                return
            kws = {k.arg: k for k in node.keywords if k.arg}
            callee = types.get(o.callee)
            fn = o.callee.name if isinstance(o.callee, (nodes.NameExpr, nodes.MemberExpr)) else ""
            infos_ = None
            if fn == "replace" and o.args:
                infos_ = instances(types.get(o.args[0])) if types.get(o.args[0]) else None
            elif fn == "_replace" and isinstance(o.callee, nodes.MemberExpr):
                t = types.get(o.callee.expr)
                infos_ = instances(t) if t else None
            elif fn == "partial" and o.args and types.get(o.args[0]):
                infos_ = instances(types.get(o.args[0]))
            elif callee is not None:
                p = T.get_proper_type(callee)
                if isinstance(p, T.FunctionLike) and p.is_type_obj():
                    infos_ = [p.type_object()]
                elif isinstance(p, T.TypeType):
                    infos_ = instances(p.item)
                elif isinstance(o.callee, nodes.RefExpr) and isinstance(o.callee.node, nodes.TypeInfo):
                    infos_ = [o.callee.node]
            elif isinstance(o.callee, nodes.RefExpr) and isinstance(o.callee.node, nodes.TypeInfo):
                infos_ = [o.callee.node]
            for k, kw in kws.items():
                if k in olds and infos_:
                    i = infos_[0]
                    init = next(
                        (
                            b
                            for b in i.mro
                            if "__init__" in b.names and not b.names["__init__"].plugin_generated and b.fullname in ours
                        ),
                        None,
                    )
                    if init is not None and fn not in ("replace", "_replace"):
                        continue
                    new = next((new_of(x, k) for x in infos_ if new_of(x, k)), None)
                    if new and new != k:
                        self.f.edit(kw.lineno, self.f.col(kw.lineno, kw.col_offset), k, new)
            if fn in ("getattr", "hasattr", "setattr", "delattr", "patch", "object") or fn in ("with_attribute",):
                if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and node.args[1].value in olds:
                    c = node.args[1]
                    t = types.get(o.args[0])
                    new = decide(self.f.path, c.lineno, instances(t) if t else None, c.value)
                    if new:
                        self.f.edit(c.lineno, self.f.col(c.lineno, c.col_offset) + 1, c.value, new)
            if (
                fn == "model_copy"
                and "update" in kws
                and isinstance(kws["update"].value, ast.Dict)
                and isinstance(o.callee, nodes.MemberExpr)
            ):
                t = types.get(o.callee.expr)
                for key in kws["update"].value.keys:
                    if isinstance(key, ast.Constant) and key.value in olds:
                        new = decide(self.f.path, key.lineno, instances(t) if t else None, key.value)
                        if new:
                            self.f.edit(key.lineno, self.f.col(key.lineno, key.col_offset) + 1, key.value, new)

        def visit_class_pattern(self, o):
            super().visit_class_pattern(o)
            for k in o.keyword_keys:
                if k in olds:
                    print("PATTERN", self.f.path, o.line, k)

    for path, tree in by_path.items():
        f = project.files[path]
        if any(o in f.text for o in olds):
            tree.accept(Uses(f))
    # definitions
    for full, (path, n) in nodes_of.items():
        table = {o: new for (c, o), new in rename.items() if c == full}
        if not table:
            continue
        f = project.files[path]
        stack = list(n.body)
        while stack:
            b = stack.pop()
            if isinstance(b, FUNCTION):
                if b.name in table:
                    m = re.compile(r"\bdef\s+").search(f.lines[b.lineno - 1], f.col(b.lineno, b.col_offset))
                    f.edit(b.lineno, m.end(), b.name, table[b.name])
                for d in b.decorator_list:
                    for x in ast.walk(d):
                        if isinstance(x, ast.Name) and x.id in table:
                            f.edit(x.lineno, f.col(x.lineno, x.col_offset), x.id, table[x.id])
                for d in [*b.args.defaults, *filter(None, b.args.kw_defaults)]:
                    for x in ast.walk(d):
                        if isinstance(x, ast.Name) and x.id in table:
                            print("DEFAULT", path, x.lineno, x.id)
            elif isinstance(b, (ast.Assign, ast.AnnAssign)):
                for t in b.targets if isinstance(b, ast.Assign) else [b.target]:
                    for x in ast.walk(t):
                        if isinstance(x, ast.Name) and x.id in table:
                            f.edit(x.lineno, f.col(x.lineno, x.col_offset), x.id, table[x.id])
                if b.value:
                    for x in ast.walk(b.value):
                        if isinstance(x, ast.Name) and x.id in table and not isinstance(b, ast.AnnAssign):
                            f.edit(x.lineno, f.col(x.lineno, x.col_offset), x.id, table[x.id])
                        if (
                            isinstance(b, ast.Assign)
                            and isinstance(x, ast.Constant)
                            and x.value in table
                            and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in b.targets)
                        ):
                            f.edit(x.lineno, f.col(x.lineno, x.col_offset) + 1, x.value, table[x.value])
            elif isinstance(b, ast.If):
                stack += b.body + b.orelse
        d = n.body[0].value if isinstance(n.body[0], ast.Expr) and isinstance(n.body[0].value, ast.Constant) else None
        if d is not None and isinstance(d.value, str):
            for line in range(d.lineno, d.end_lineno + 1):
                s = f.lines[line - 1]
                m = re.match(r"^\s+(\w+)(?=:)", s)
                if m and m[1] in table:
                    f.edit(line, m.start(1), m[1], table[m[1]])
    for name, where in sorted(unknown.items()):
        print("UNKNOWN", name, len(where), {new for (c, o), new in rename.items() if o == name}, where[:200])
    print("edits", sum(len(f.edits) for f in project.files.values()))
    if "--dry" not in sys.argv:
        print("saved", project.save())


main()
