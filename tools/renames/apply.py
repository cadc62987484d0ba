"""Apply a table of renames to the repository: `python3.12 apply.py TABLE... [--dry] [--no-lsp]`, from the repository's root.

Each line of a table: kind, file, qualified name, new name, separated by tabs; lines that begin with # are comments.
Names of modules are moved by `git mv` and in imports. Module-level names follow imports, parameters their function and the
keywords of calls, members the classes that define them; a member that is ambiguous is renamed by pyright's language server.
"""

# ruff: noqa
import ast
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import tokenize
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path.cwd()
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def tracked(*patterns):
    return [
        p
        for p in subprocess.check_output(["git", "ls-files", *patterns], text=True).split("\n")
        if p and Path(p).exists()
    ]


def code_files():
    return tracked("*.py", "*.pyi")


def doc_files():
    skip = ("changelog.d/", "CHANGELOG", "benchmarks/results", "tests/golden", "constraints", "tools/renames")
    return [
        p
        for p in tracked("*.md", "*.toml", "Makefile", "*.yml", "*.yaml", "*.json", "*.sh", "*.ipynb")
        if not p.startswith(skip)
    ]


# -- modules
def module_name(path):
    """Dotted name of a file, by the root of its package."""
    p = path
    for root in ("core/", "tests/support/"):
        if p.startswith(root):
            p = p[len(root) :]
            break
    else:
        m = re.match(r"(?:plugins/[^/]+|examples/[^/]+)/src/(.*)", p)
        if m:
            p = m[1]
    p = re.sub(r"\.pyi?$", "", p)
    p = re.sub(r"/__init__$", "", p)
    return p.replace("/", ".")


class Scopes(ast.NodeVisitor):
    """Yield (node, scope chain) for names; a scope is a set of bound names."""

    def __init__(self):
        self.names = []  # (Name node, bound by an inner function scope?)
        self.stack = []
        self.classes = []

    def bound(self, node):
        out, skip = set(), set()
        args = getattr(node, "args", None)
        if isinstance(args, ast.arguments):
            for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]:
                out.add(a.arg)
        globs = set()

        def walk(n, top):
            for c in ast.iter_child_nodes(n):
                if isinstance(c, (*FUNCTION, ast.ClassDef)):
                    out.add(c.name)
                    continue
                if isinstance(c, ast.Lambda):
                    continue
                if isinstance(c, ast.Global):
                    globs.update(c.names)
                if isinstance(c, ast.Nonlocal):
                    skip.update(c.names)
                if isinstance(c, ast.Name) and isinstance(c.ctx, (ast.Store, ast.Del)):
                    out.add(c.id)
                if isinstance(c, (ast.Import, ast.ImportFrom)):
                    for a in c.names:
                        out.add((a.asname or a.name).split(".")[0])
                if isinstance(c, ast.ExceptHandler) and c.name:
                    out.add(c.name)
                if isinstance(c, (ast.MatchAs, ast.MatchStar)) and c.name:
                    out.add(c.name)
                walk(c, False)

        body = node.body if isinstance(node.body, list) else [node.body]
        for b in body:
            holder = ast.Module(body=[b], type_ignores=[]) if isinstance(b, ast.stmt) else ast.Expression(body=b)
            walk(holder, True)
        return out - globs - skip

    def visit_FunctionDef(self, n):
        for d in n.decorator_list:
            self.visit(d)
        a = n.args
        for x in [*a.defaults, *filter(None, a.kw_defaults)]:
            self.visit(x)
        for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]:
            if x.annotation:
                self.visit(x.annotation)
        if n.returns:
            self.visit(n.returns)
        for t in getattr(n, "type_params", []):
            self.visit(t)
        self.stack.append((n, self.bound(n)))
        for b in n.body:
            self.visit(b)
        self.stack.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, n):
        for x in [*n.args.defaults, *filter(None, n.args.kw_defaults)]:
            self.visit(x)
        self.stack.append((n, self.bound(n)))
        self.visit(n.body)
        self.stack.pop()

    def visit_ClassDef(self, n):
        for x in [*n.decorator_list, *n.bases, *[k.value for k in n.keywords], *getattr(n, "type_params", [])]:
            self.visit(x)
        bound = set()
        for b in n.body:
            for x in ast.walk(b) if isinstance(b, (ast.Assign, ast.AnnAssign)) else [b]:
                if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                    bound.add(x.id)
                elif isinstance(x, FUNCTION):
                    bound.add(x.name)
        for b in n.body:
            if isinstance(b, (ast.Assign, ast.AnnAssign)):
                # annotations are evaluated (or read) with the module's names
                if isinstance(b, ast.AnnAssign):
                    self.visit(b.annotation)
                self.stack.append((n, bound))
                for x in b.targets if isinstance(b, ast.Assign) else [b.target]:
                    self.visit(x)
                if b.value is not None:
                    self.visit(b.value)
                self.stack.pop()
            else:
                self.visit(b)

    def visit_Name(self, n):
        owner = None
        for node, names in reversed(self.stack):
            if n.id in names:
                owner = node
                break
        self.names.append((n, owner))


class File:
    def __init__(self, path):
        self.path = path
        self.text = Path(path).read_text()
        self.tree = ast.parse(self.text)
        self.lines = self.text.splitlines(keepends=True)
        self.bytes = [l.encode() for l in self.lines]
        self.module = module_name(path)
        self.edits = {}
        self.scopes = None

    def names(self):
        if self.scopes is None:
            self.scopes = Scopes()
            self.scopes.visit(self.tree)
        return self.scopes.names

    def col(self, line, bytecol):
        return len(self.bytes[line - 1][:bytecol].decode())

    def edit(self, line, col, old, new):
        at = self.lines[line - 1][col : col + len(old)]
        if at != old:
            print("MISMATCH", self.path, line, col, repr(at), old)
            return
        self.edits[(line, col)] = (old, new)

    def save(self):
        if not self.edits:
            return False
        lines = list(self.lines)
        for (line, col), (old, new) in sorted(self.edits.items(), reverse=True):
            l = lines[line - 1]
            lines[line - 1] = l[:col] + new + l[col + len(old) :]
        Path(self.path).write_text("".join(lines))
        return True


def resolve_from(file, node):
    """Dotted module that an ImportFrom names."""
    if not node.level:
        return node.module or ""
    base = file.module.split(".")
    is_package = re.search(r"/__init__\.pyi?$", file.path)
    drop = node.level - (1 if is_package else 0)
    base = base[: len(base) - drop] if drop else base
    return ".".join([*base, *((node.module or "").split(".") if node.module else [])])


class Project:
    def __init__(self):
        self.files = {p: File(p) for p in code_files()}
        self.by_module = defaultdict(list)
        for f in self.files.values():
            self.by_module[f.module].append(f)
        self.exports = {}

    def origin(self, module, name, seen=()):
        """(module, name) where `module.name` is defined, following re-exports."""
        if (module, name) in seen:
            return None
        for f in self.by_module.get(module, []):
            top = self.toplevel(f)
            if name in top:
                kind, value = top[name]
                if kind == "def":
                    return (module, name)
                found = self.origin(*value, seen=(*seen, (module, name)))
                if found:
                    return found
        if f"{module}.{name}" in self.by_module:
            return (f"{module}.{name}", None)
        return None

    def toplevel(self, f):
        if hasattr(f, "top"):
            return f.top
        top = {}

        def walk(body):
            for n in body:
                if isinstance(n, (*FUNCTION, ast.ClassDef)):
                    top[n.name] = ("def", None)
                elif isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                    for t in n.targets if isinstance(n, ast.Assign) else [n.target]:
                        for x in ast.walk(t):
                            if isinstance(x, ast.Name):
                                top[x.id] = ("def", None)
                elif isinstance(n, ast.ImportFrom):
                    m = resolve_from(f, n)
                    for a in n.names:
                        top.setdefault(a.asname or a.name, ("import", (m, a.name)))
                elif isinstance(n, (ast.If, ast.Try, ast.With, ast.For)):
                    walk(n.body)
                    walk(getattr(n, "orelse", []))
                    walk(getattr(n, "finalbody", []))
                    for h in getattr(n, "handlers", []):
                        walk(h.body)

        walk(f.tree.body)
        f.top = top
        return top

    def save(self):
        n = sum(f.save() for f in self.files.values())
        return n


STRING_CALL = re.compile(r"(setattr|getattr|hasattr|delattr|patch\.object|attrgetter|temporary_attribute)\(")


def rename_globals(project, table):
    """table: {(module, name): new}"""
    olds = {n for _, n in table}
    for f in project.files.values():
        if not any(o in f.text for o in olds):
            continue
        top = project.toplevel(f)
        here = {}  # local name at module level -> new local name
        modules = {}  # local alias -> module
        local = defaultdict(dict)  # function node -> names imported there

        def origin_new(module, name):
            o = project.origin(module, name)
            return table.get(o) if o else None

        for name in top:
            new = origin_new(f.module, name)
            if new:
                here[name] = new
        parents = {}
        for n in ast.walk(f.tree):
            for c in ast.iter_child_nodes(n):
                parents[c] = n
        renamed_in = defaultdict(dict)
        for n in ast.walk(f.tree):
            if isinstance(n, ast.ImportFrom):
                m = resolve_from(f, n)
                fn = n
                while fn in parents and not isinstance(fn, FUNCTION):
                    fn = parents[fn]
                fn = fn if isinstance(fn, FUNCTION) else None
                for a in n.names:
                    new = origin_new(m, a.name)
                    if f"{m}.{a.name}" in project.by_module:
                        modules[(fn, a.asname or a.name)] = f"{m}.{a.name}"
                    if not new:
                        continue
                    c = f.col(a.lineno, a.col_offset)
                    f.edit(a.lineno, c, a.name, new)
                    if a.asname == a.name:
                        c2 = f.col(a.end_lineno, a.end_col_offset) - len(a.asname)
                        f.edit(a.end_lineno, c2, a.asname, new)
                        renamed_in[fn][a.name] = new
                    elif a.asname is None:
                        renamed_in[fn][a.name] = new
                    else:
                        here.pop(a.asname, None) if fn is None else None
            elif isinstance(n, ast.Import):
                for a in n.names:
                    if a.asname and a.name in project.by_module:
                        modules[(None, a.asname)] = a.name
                    elif a.name.split(".")[0] in project.by_module:
                        modules[(None, a.name.split(".")[0])] = a.name.split(".")[0]
        for name, new in list(here.items()):
            if top[name][0] == "import" and name not in renamed_in[None]:
                here.pop(name)
        for n, owner in f.names():
            new = here.get(n.id) if owner is None else renamed_in.get(owner, {}).get(n.id)
            if new:
                f.edit(n.lineno, f.col(n.lineno, n.col_offset), n.id, new)
        for n in ast.walk(f.tree):
            if isinstance(n, (*FUNCTION, ast.ClassDef)) and parents.get(n) is not None:
                up = parents[n]
                while isinstance(up, (ast.If, ast.Try, ast.With)):
                    up = parents[up]
                if isinstance(up, ast.Module) and n.name in here:
                    line = f.lines[n.lineno - 1]
                    m = re.compile(r"\b(def|class)\s+").search(line, f.col(n.lineno, n.col_offset))
                    f.edit(n.lineno, m.end(), n.name, here[n.name])
            elif isinstance(n, ast.Global):
                for name in n.names:
                    if name in here:
                        line = f.lines[n.lineno - 1]
                        for m in re.finditer(r"\b%s\b" % re.escape(name), line):
                            f.edit(n.lineno, m.start(), name, here[name])
            elif isinstance(n, ast.Attribute):
                chain, x = [n.attr], n.value
                while isinstance(x, ast.Attribute):
                    chain.insert(0, x.attr)
                    x = x.value
                if isinstance(x, ast.Name):
                    for fn in {k[0] for k in modules if k[1] == x.id}:
                        mod = modules[(fn, x.id)]
                        full = ".".join([mod, *chain[:-1]])
                        new = origin_new(full, n.attr)
                        if new:
                            f.edit(n.end_lineno, f.col(n.end_lineno, n.end_col_offset) - len(n.attr), n.attr, new)
            elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.lineno == n.end_lineno:
                v = n.value
                src = f.lines[n.lineno - 1]
                c = f.col(n.lineno, n.col_offset)
                m = re.match(r"""["']""", src[c:])
                if not m:
                    continue
                up = parents.get(n)
                while isinstance(up, (ast.List, ast.Tuple, ast.BinOp, ast.Subscript)):
                    up = parents[up]
                is_type = isinstance(up, (ast.arg, ast.AnnAssign, *FUNCTION)) and not (
                    isinstance(up, FUNCTION) and n in ast.walk(ast.Module(body=up.body, type_ignores=[]))
                )
                is_type = is_type and (
                    not isinstance(up, ast.AnnAssign)
                    or n in ast.walk(up.annotation)
                    or "TypeAlias" in ast.unparse(up.annotation)
                )
                is_type = is_type or (
                    isinstance(up, ast.Call)
                    and ast.unparse(up.func) in ("cast", "typing.cast", "TypeVar")
                    and n in ast.walk(up.args[0])
                )
                if is_type:
                    for m in re.finditer(r"(?<![\w.])[A-Za-z_]\w*", v):
                        if m[0] in here:
                            f.edit(n.lineno, c + 1 + m.start(), m[0], here[m[0]])
                elif re.fullmatch(r"meshwright\w*(\.\w+)+", v):
                    parts = v.split(".")
                    for i in range(1, len(parts)):
                        new = origin_new(".".join(parts[:i]), parts[i])
                        if new:
                            f.edit(n.lineno, c + 1 + len(".".join(parts[:i])) + 1, parts[i], new)
                elif v in olds and isinstance(parents.get(n), ast.Call):
                    call = parents[n]
                    if (
                        STRING_CALL.match(ast.unparse(call.func).split(".")[-1] + "(")
                        and len(call.args) > 1
                        and call.args[1] is n
                        and isinstance(call.args[0], ast.Name)
                    ):
                        for fn in {k[0] for k in modules if k[1] == call.args[0].id}:
                            new = origin_new(modules[(fn, call.args[0].id)], v)
                            if new:
                                f.edit(n.lineno, c + 1, v, new)
                elif v in here:
                    up = parents.get(n)
                    while isinstance(up, (ast.List, ast.Tuple, ast.BinOp)):
                        up = parents[up]
                    if isinstance(up, (ast.Assign, ast.AugAssign)) and "__all__" in ast.unparse(up).split("=")[0]:
                        f.edit(n.lineno, c + 1, v, here[v])


def in_text_tokens(t, change):
    """Source with its strings and comments changed."""
    lines = t.splitlines(keepends=True)
    offs = [0]
    for l in lines:
        offs.append(offs[-1] + len(l))
    out = []
    kinds = [tokenize.STRING, tokenize.COMMENT, tokenize.FSTRING_MIDDLE]
    for k in tokenize.generate_tokens(io.StringIO(t).readline):
        if k.type in kinds:
            a, b = offs[k.start[0] - 1] + k.start[1], offs[k.end[0] - 1] + k.end[1]
            n = change(t[a:b])
            if n != t[a:b]:
                out.append((a, b, n))
    for a, b, n in reversed(out):
        t = t[:a] + n + t[b:]
    return t


def move_modules(project, moves):
    """moves: {old path: new path} of files and folders; imports, dotted strings and paths in text follow."""
    paths = {}
    for p in tracked("*"):
        for old, new in sorted(moves.items(), key=lambda x: -len(x[0])):
            if p == old or p.startswith(old.rstrip("/") + "/"):
                target = new.rstrip("/") + p[len(old.rstrip("/")) :]
                # a folder above it may move, too
                paths[p] = target
                break
    changed = True
    while changed:
        changed = False
        for p, t in paths.items():
            for old, new in moves.items():
                if t.startswith(old.rstrip("/") + "/") and not t.startswith(new.rstrip("/") + "/"):
                    paths[p] = new.rstrip("/") + t[len(old.rstrip("/")) :]
                    changed = True
    modules = {}
    for p, t in paths.items():
        if p.endswith((".py", ".pyi")):
            modules[module_name(p)] = module_name(t)

    def new_module(m):
        return modules.get(m, m)

    for f in project.files.values():
        own_new = new_module(f.module)
        is_package = f.path.endswith(("__init__.py", "__init__.pyi"))
        renamed = {}
        for n in ast.walk(f.tree):
            if isinstance(n, ast.ImportFrom):
                m = resolve_from(f, n)
                target = new_module(m)
                aliases = []
                for a in n.names:
                    sub = f"{m}.{a.name}"
                    if (
                        sub in project.by_module
                        and project.toplevel(project.by_module[m][0]).get(a.name, ("import",))[0] != "def"
                        if m in project.by_module
                        else sub in project.by_module
                    ):
                        nsub = new_module(sub)
                        parent, leaf = nsub.rpartition(".")[0], nsub.rpartition(".")[2]
                        if parent != target:
                            if len(n.names) == 1:
                                target = parent
                            else:
                                print("SPLIT", f.path, n.lineno, ast.unparse(n))
                        if leaf != a.name:
                            c = f.col(a.lineno, a.col_offset)
                            f.edit(a.lineno, c, a.name, leaf)
                            if a.asname is None:
                                renamed[a.name] = leaf
                if target == m and own_new == f.module:
                    continue
                line = f.lines[n.lineno - 1]
                c = f.col(n.lineno, n.col_offset)
                mm = re.compile(r"from\s+(\.*[\w.]*)\s+import").match(line, c)
                old_text = mm[1]
                if n.level:
                    base = own_new.split(".") if is_package else own_new.split(".")[:-1]
                    t = target.split(".")
                    k = 0
                    while k < len(base) and k < len(t) and base[k] == t[k]:
                        k += 1
                    new_text = "." * (len(base) - k + 1) + ".".join(t[k:])
                else:
                    new_text = target
                if new_text != old_text:
                    f.edit(n.lineno, mm.start(1), old_text, new_text)
            elif isinstance(n, ast.Import):
                for a in n.names:
                    if new_module(a.name) != a.name:
                        f.edit(a.lineno, f.col(a.lineno, a.col_offset), a.name, new_module(a.name))
                        if not a.asname and "." not in a.name:
                            renamed[a.name] = new_module(a.name)
            elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.lineno == n.end_lineno:
                v = n.value
                if re.fullmatch(r"meshwright\w*(\.\w+)+", v):
                    parts = v.split(".")
                    for i in range(len(parts), 1, -1):
                        m = ".".join(parts[:i])
                        if m in modules:
                            c = f.col(n.lineno, n.col_offset)
                            f.edit(n.lineno, c + 1, v, ".".join([modules[m], *parts[i:]]))
                            break
        if renamed:
            for n, owner in f.names():
                if n.id in renamed and owner is None:
                    f.edit(n.lineno, f.col(n.lineno, n.col_offset), n.id, renamed[n.id])
                elif n.id in renamed and any(
                    isinstance(x, ast.ImportFrom) and any(a.name == n.id for a in x.names) for x in ast.walk(owner)
                ):
                    f.edit(n.lineno, f.col(n.lineno, n.col_offset), n.id, renamed[n.id])
    project.save()
    # paths and dotted names in text
    table = {}
    for p, t in paths.items():
        table[p] = t
    for m, t in modules.items():
        if m.startswith("meshwright"):
            table[m] = t
    keys = sorted((k for k in table if "/" in k or "." in k), key=len, reverse=True)
    r = re.compile(r"(?<![\w/.])(" + "|".join(map(re.escape, keys)) + r")(?![\w/]|\.\w)")
    folders = sorted(moves, key=len, reverse=True)
    for p in [*doc_files(), *code_files(), *tracked("*.css", "*.js", "*.txt", "*.cfg")]:
        if p.startswith(("tools/renames", "changelog.d", "CHANGELOG", "benchmarks/results")):
            continue
        t = Path(p).read_text()
        if p.endswith((".py", ".pyi")):
            n = in_text_tokens(
                t,
                lambda s: s if re.fullmatch(r"[\"']meshwright\w*(\.\w+)+[\"']", s) else r.sub(lambda m: table[m[1]], s),
            )
        else:
            n = r.sub(lambda m: table[m[1]], t)
        for o in folders:
            if "." not in o.rsplit("/", 1)[-1]:
                n = re.sub(r"(?<![\w/.])" + re.escape(o) + r"(?=/|`|\b)", moves[o], n)
        if n != t:
            Path(p).write_text(n)
    for p, t in sorted(paths.items()):
        Path(t).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", p, t], check=True)


def find_def(body, parts):
    for n in body:
        if isinstance(n, (*FUNCTION, ast.ClassDef)) and n.name == parts[0]:
            if len(parts) == 1:
                return n
            r = find_def(n.body, parts[1:])
            if r is not None:
                return r
        elif isinstance(n, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for fld in ("body", "orelse", "finalbody"):
                r = find_def(getattr(n, fld, []) or [], parts)
                if r is not None:
                    return r
    return None


def rename_parameters(project, entries):
    """entries: [(file, function qual, param, new)]"""
    wanted = defaultdict(lambda: defaultdict(set))  # callable name -> param -> set(new)
    having = defaultdict(lambda: defaultdict(int))
    for f in project.files.values():
        for n in ast.walk(f.tree):
            if isinstance(n, ast.ClassDef):
                for b in n.body:
                    if isinstance(b, FUNCTION) and b.name == "__init__":
                        for a in [*b.args.posonlyargs, *b.args.args, *b.args.kwonlyargs]:
                            having[n.name][a.arg] += 1
            if isinstance(n, FUNCTION):
                for a in [*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs]:
                    having[n.name][a.arg] += 1
    count = defaultdict(lambda: defaultdict(int))
    subclasses = defaultdict(set)
    for f in project.files.values():
        for n in ast.walk(f.tree):
            if isinstance(n, ast.ClassDef):
                for b in n.bases:
                    subclasses[ast.unparse(b).split("[")[0].split(".")[-1]].add(n.name)
    for file, qual, param, new in entries:
        f = project.files.get(file)
        parts = qual.split(".")
        fn = find_def(f.tree.body, parts) if f else None
        if not isinstance(fn, FUNCTION):
            print("NOFUNC", file, qual, param)
            continue
        args = fn.args
        hit = [
            a
            for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]
            if a.arg == param
        ]
        if not hit:
            print("NOPARAM", file, qual, param)
            continue
        f.edit(hit[0].lineno, f.col(hit[0].lineno, hit[0].col_offset), param, new)
        bound = Scopes().bound(fn)
        if new in bound and new != param:
            print("CLASH", file, qual, param, new)
        for n, owner in f.names():
            if n.id == param and owner is fn:
                f.edit(n.lineno, f.col(n.lineno, n.col_offset), param, new)
        for n in ast.walk(fn):
            if isinstance(n, ast.Nonlocal) and param in n.names:
                m = re.search(r"\b%s\b" % re.escape(param), f.lines[n.lineno - 1])
                f.edit(n.lineno, m.start(), param, new)
        # "Args:" of the docstring
        doc = (
            fn.body[0].value
            if fn.body and isinstance(fn.body[0], ast.Expr) and isinstance(fn.body[0].value, ast.Constant)
            else None
        )
        if parts[-1] == "__init__" and len(parts) > 1:
            cls = find_def(f.tree.body, parts[:-1])
            cdoc = (
                cls.body[0].value
                if isinstance(cls.body[0], ast.Expr) and isinstance(cls.body[0].value, ast.Constant)
                else None
            )
        else:
            cdoc = None
        for d in filter(None, (doc, cdoc)):
            if isinstance(d.value, str):
                for line in range(d.lineno, d.end_lineno + 1):
                    s = f.lines[line - 1]
                    for m in re.finditer(r"(^\s+%s(?=:)|(?<=`)%s(?=`))" % (re.escape(param), re.escape(param)), s):
                        c = m.end() - len(param)
                        f.edit(line, c, param, new)
        callee = parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1]
        names = {callee}
        if parts[-1] == "__init__":
            todo = [callee]
            while todo:
                for s in subclasses[todo.pop()]:
                    if s not in names:
                        names.add(s)
                        todo.append(s)
            names.add(f"super:{callee}")
        for name in names:
            wanted[name][param].add(new)
            count[name][param] += 1
    ambiguous = []
    for f in project.files.values():
        for n in ast.walk(f.tree):
            if isinstance(n, ast.Call):
                name = ast.unparse(n.func).split(".")[-1] if not isinstance(n.func, ast.Call) else ""
                if isinstance(n.func, ast.Attribute):
                    name = n.func.attr
                if name == "partial" and n.args:
                    name = ast.unparse(n.args[0]).split(".")[-1]
                for k in n.keywords:
                    if k.arg and k.arg in wanted.get(name, {}):
                        news = wanted[name][k.arg]
                        if len(news) == 1 and having[name][k.arg] <= count[name][k.arg]:
                            f.edit(k.lineno, f.col(k.lineno, k.col_offset), k.arg, next(iter(news)))
                        else:
                            ambiguous.append((f.path, n.lineno, name, k.arg, sorted(news)))
    for a in ambiguous:
        print("AMBIGUOUS-KEYWORD", *a)


def rename_members_everywhere(project, table, paths=None):
    """table: {name: new}, where all classes that define the name rename it so; in all files, or in those of `paths`."""
    olds = set(table)
    for f in project.files.values() if paths is None else [project.files[path] for path in paths]:
        if not any(o in f.text for o in olds):
            continue
        parents = {}
        for n in ast.walk(f.tree):
            for c in ast.iter_child_nodes(n):
                parents[c] = n
        for n in ast.walk(f.tree):
            if isinstance(n, ast.Attribute) and n.attr in table:
                f.edit(n.end_lineno, f.col(n.end_lineno, n.end_col_offset) - len(n.attr), n.attr, table[n.attr])
            elif isinstance(n, ast.ClassDef):
                for b in n.body:
                    stack = [b]
                    while stack:
                        b = stack.pop()
                        if isinstance(b, FUNCTION):
                            if b.name in table:
                                m = re.compile(r"\bdef\s+").search(f.lines[b.lineno - 1], f.col(b.lineno, b.col_offset))
                                f.edit(b.lineno, m.end(), b.name, table[b.name])
                        elif isinstance(b, (ast.Assign, ast.AnnAssign)):
                            for t in b.targets if isinstance(b, ast.Assign) else [b.target]:
                                for x in ast.walk(t):
                                    if isinstance(x, ast.Name) and x.id in table:
                                        f.edit(x.lineno, f.col(x.lineno, x.col_offset), x.id, table[x.id])
                            # uses of the name in the class's body
                            if b.value:
                                for x in ast.walk(b.value):
                                    if (
                                        isinstance(x, ast.Name)
                                        and x.id in table
                                        and any(x.id == y for y in class_names(n))
                                    ):
                                        f.edit(x.lineno, f.col(x.lineno, x.col_offset), x.id, table[x.id])
                        elif isinstance(b, ast.If):
                            stack += b.body + b.orelse
                d = (
                    n.body[0].value
                    if isinstance(n.body[0], ast.Expr) and isinstance(n.body[0].value, ast.Constant)
                    else None
                )
                if d is not None and isinstance(d.value, str):
                    for line in range(d.lineno, d.end_lineno + 1):
                        s = f.lines[line - 1]
                        m = re.match(r"^\s+(\w+)(?=:)", s)
                        if m and m[1] in table and m[1] in class_names(n):
                            f.edit(line, m.start(1), m[1], table[m[1]])
            elif isinstance(n, ast.Call):
                name = n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
                for k in n.keywords:
                    if k.arg in table and (
                        name[:1].isupper()
                        or name in ("replace", "cls", "partial", "_replace")
                        or name.lstrip("_")[:1].isupper()
                    ):
                        f.edit(k.lineno, f.col(k.lineno, k.col_offset), k.arg, table[k.arg])
                if (
                    STRING_CALL.match(name + "(")
                    and len(n.args) > 1
                    and isinstance(n.args[1], ast.Constant)
                    and n.args[1].value in table
                ):
                    c = n.args[1]
                    f.edit(c.lineno, f.col(c.lineno, c.col_offset) + 1, c.value, table[c.value])


def class_names(n):
    out = set()
    for b in n.body:
        if isinstance(b, FUNCTION):
            out.add(b.name)
        elif isinstance(b, (ast.Assign, ast.AnnAssign)):
            for t in b.targets if isinstance(b, ast.Assign) else [b.target]:
                out |= {x.id for x in ast.walk(t) if isinstance(x, ast.Name)}
    for x in ast.walk(n):
        if (
            isinstance(x, ast.Attribute)
            and isinstance(x.ctx, ast.Store)
            and isinstance(x.value, ast.Name)
            and x.value.id == "self"
        ):
            out.add(x.attr)
    return out


def is_distinctive(o):
    return "_" in o.strip("_") or bool(re.search(r"[a-z][A-Z]", o))


def rename_in_text(files_docs, project_files, table):
    """Names in comments, docstrings and documents: distinctive ones everywhere, others within backticks."""
    strong = {o for o in table if is_distinctive(o)}
    weak = {o for o in table if o not in strong}
    sre = (
        re.compile(r"(?<![\w/\-])(" + "|".join(map(re.escape, sorted(strong, key=len, reverse=True))) + r")(?![\w])")
        if strong
        else None
    )

    def one(s):
        if sre:
            s = sre.sub(lambda m: table[m[1]], s)
        if weak:
            s = re.sub(
                r"`[^`\n]+`",
                lambda m: re.sub(
                    r"(?<![\w\-])[A-Za-z_]\w*(?![\w\-])", lambda n: table[n[0]] if n[0] in weak else n[0], m[0]
                ),
                s,
            )
        return s

    for p in files_docs:
        t = Path(p).read_text()
        n = one(t)
        if n != t:
            Path(p).write_text(n)
    for p in project_files:
        t = Path(p).read_text()
        out, last = [], 0
        lines = t.splitlines(keepends=True)
        offs = [0]
        for l in lines:
            offs.append(offs[-1] + len(l))
        try:
            toks = list(tokenize.generate_tokens(io.StringIO(t).readline))
        except tokenize.TokenError:
            continue
        for k in toks:
            kinds = [tokenize.STRING, tokenize.COMMENT] + (
                [tokenize.FSTRING_MIDDLE] if hasattr(tokenize, "FSTRING_MIDDLE") else []
            )
            if k.type in kinds:
                a, b = offs[k.start[0] - 1] + k.start[1], offs[k.end[0] - 1] + k.end[1]
                s = t[a:b]
                if (
                    k.type == tokenize.STRING
                    and not s.lstrip("rbuRBU").startswith(('"""', "'''"))
                    and re.fullmatch(r"[\"'][\w.\-/]*[\"']", s)
                ):
                    continue
                n = one(s)
                if n != s:
                    out.append((a, b, n))
        for a, b, n in reversed(out):
            t = t[:a] + n + t[b:]
        if out:
            Path(p).write_text(t)


class Lsp:
    """pyright's language server."""

    def __init__(self):
        js = next(Path(".venv").glob("lib/*/site-packages/pyright/dist/langserver.index.js"))
        self.p = subprocess.Popen(
            ["node", "--max-old-space-size=6000", str(js), "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.id, self.res, self.ev = 0, {}, threading.Condition()
        threading.Thread(target=self.reader, daemon=True).start()
        self.req(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": ROOT.as_uri(),
                "workspaceFolders": [{"uri": ROOT.as_uri(), "name": "r"}],
                "capabilities": {
                    "workspace": {
                        "workspaceFolders": True,
                        "configuration": True,
                        "workspaceEdit": {"documentChanges": True},
                    },
                    "textDocument": {"rename": {"prepareSupport": True}},
                },
            },
        )
        self.note("initialized", {})
        self.versions = {}

    def reader(self):
        f = self.p.stdout
        while True:
            n = 0
            while True:
                l = f.readline()
                if not l:
                    return
                l = l.strip()
                if not l:
                    break
                if l.lower().startswith(b"content-length:"):
                    n = int(l.split(b":")[1])
            m = json.loads(f.read(n))
            if "id" in m and "method" in m:
                r = [{} for _ in m["params"]["items"]] if m["method"] == "workspace/configuration" else None
                self.send({"jsonrpc": "2.0", "id": m["id"], "result": r})
            elif "id" in m:
                with self.ev:
                    self.res[m["id"]] = m
                    self.ev.notify_all()

    def send(self, m):
        b = json.dumps(m).encode()
        self.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b)
        self.p.stdin.flush()

    def note(self, method, params):
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def req(self, method, params, timeout=300):
        self.id += 1
        i = self.id
        self.send({"jsonrpc": "2.0", "id": i, "method": method, "params": params})
        with self.ev:
            if not self.ev.wait_for(lambda: i in self.res, timeout):
                raise TimeoutError(method)
            return self.res.pop(i)

    def doc(self, file):
        uri = (ROOT / file).as_uri()
        if file not in self.versions:
            self.versions[file] = 1
            self.note(
                "textDocument/didOpen",
                {"textDocument": {"uri": uri, "languageId": "python", "version": 1, "text": Path(file).read_text()}},
            )
        return uri

    def rename(self, file, pos, new):
        r = self.req(
            "textDocument/rename",
            {
                "textDocument": {"uri": self.doc(file)},
                "position": {"line": pos[0], "character": pos[1]},
                "newName": new,
            },
        )
        if r.get("error") or not r.get("result"):
            return None
        edits = defaultdict(list)
        for dc in r["result"].get("documentChanges", []):
            edits[dc["textDocument"]["uri"]] += dc["edits"]
        for u, e in (r["result"].get("changes") or {}).items():
            edits[u] += e
        n = 0
        for u, es in edits.items():
            p = Path(unquote(urlparse(u).path))
            lines = p.read_text().split("\n")
            for e in sorted(
                es, key=lambda e: (e["range"]["start"]["line"], e["range"]["start"]["character"]), reverse=True
            ):
                s, t = e["range"]["start"], e["range"]["end"]
                L = lines[s["line"]]
                lines[s["line"]] = L[: s["character"]] + e["newText"] + L[t["character"] :]
                n += 1
            p.write_text("\n".join(lines))
            file = str(p.relative_to(ROOT))
            self.doc(file)
            self.versions[file] += 1
            self.note(
                "textDocument/didChange",
                {
                    "textDocument": {"uri": u, "version": self.versions[file]},
                    "contentChanges": [{"text": p.read_text()}],
                },
            )
        return n


def member_position(f, cls_parts, name):
    n = find_def(f.tree.body, cls_parts)
    if n is None:
        return None
    stack = list(n.body) if isinstance(n, ast.ClassDef) else []
    for b in stack:
        if isinstance(b, FUNCTION) and b.name == name:
            m = re.compile(r"\bdef\s+").search(f.lines[b.lineno - 1], f.col(b.lineno, b.col_offset))
            return b.lineno - 1, m.end()
        if isinstance(b, (ast.Assign, ast.AnnAssign)):
            for t in b.targets if isinstance(b, ast.Assign) else [b.target]:
                for x in ast.walk(t):
                    if isinstance(x, ast.Name) and x.id == name:
                        return x.lineno - 1, f.col(x.lineno, x.col_offset)
        if isinstance(b, ast.If):
            stack += b.body + b.orelse
    for x in ast.walk(n):
        if (
            isinstance(x, ast.Attribute)
            and isinstance(x.ctx, ast.Store)
            and x.attr == name
            and isinstance(x.value, ast.Name)
            and x.value.id in ("self", "cls")
        ):
            return x.end_lineno - 1, f.col(x.end_lineno, x.end_col_offset) - len(name)
    for x in ast.walk(n):  # a local variable or nested function
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id == name:
            return x.lineno - 1, f.col(x.lineno, x.col_offset)
        if isinstance(x, FUNCTION) and x.name == name and x is not n:
            m = re.compile(r"\bdef\s+").search(f.lines[x.lineno - 1], f.col(x.lineno, x.col_offset))
            return x.lineno - 1, m.end()
    return None


COMMON = set()
for t in (
    str,
    bytes,
    dict,
    list,
    set,
    tuple,
    int,
    float,
    Path,
    threading.Thread,
    threading.Condition,
    subprocess.Popen,
    ast.AST,
    io.BytesIO,
    type,
    Exception,
    re.Pattern,
    re.Match,
):
    COMMON |= {x for x in dir(t)}
COMMON |= set(
    "parameters shape size dtype device grad data steps step start stop end name config state group groups rank ranks count kind index keys values items copy clear update get set put read write open close send receive run wait exit is_alive pid join split file path text lines line label labels loss weight bias forward backward eval train module modules buffers children register_buffer hooks options args kwargs func keywords defaults annotations metadata version time seconds now since until of to at over on off total length sizes numel item tolist norm norms mean sum sums min max square abs axis axes dim dims mesh world node nodes host port url headers body status message reason error errors exc code location ended memory profile schedule device_type parts whole pieces entry entries note notes skipped tokens num_tokens positions mask masks scale heads layers experts capacity limit limits value result results report reports title description summary samples sample rows row columns column table".split()
)


def main():
    rows = []
    for p in [a for a in sys.argv[1:] if not a.startswith("--")]:
        for l in open(p):
            l = l.rstrip("\n")
            if l.strip() and not l.startswith("#"):
                r = l.split("\t")
                if len(r) == 4:
                    rows.append(r)
    only = next(
        (set(a[7:].split(",")) for a in sys.argv if a.startswith("--only=")),
        {"globals", "parameters", "members", "lsp", "text"},
    )
    project = Project()
    if only == {"modules"}:
        move_modules(
            project,
            {file: new for kind, file, qual, new in rows if kind == "module" and file != new and Path(file).exists()},
        )
        return
    text_table = {}
    seen_defs = defaultdict(set)
    for f in project.files.values():
        for n in ast.walk(f.tree):
            if isinstance(n, ast.ClassDef):
                for m in class_names(n):
                    seen_defs[m].add((f.path, n.name))
    if "globals" in only:
        table = {}
        for kind, file, qual, new in rows:
            if (
                kind in ("function", "class", "constant", "exception", "hook", "variable")
                and re.fullmatch(r"\w+", qual)
                and file in project.files
            ):
                if qual != new:
                    table[(project.files[file].module, qual)] = new
        rename_globals(project, table)
        print("globals", len(table))
        by = defaultdict(set)
        for (m, n), new in table.items():
            by[n].add(new)
        all_globals = defaultdict(set)
        for f in project.files.values():
            for n, (k, _) in project.toplevel(f).items():
                if k == "def":
                    all_globals[n].add(f.module)
        for n, news in by.items():
            if (
                len(news) == 1
                and len(all_globals[n]) <= sum(1 for (m, x) in table if x == n)
                and n not in seen_defs
                and not (not is_distinctive(n) and n.islower())
            ):
                text_table[n] = next(iter(news))
    if "parameters" in only:
        entries = []
        for kind, file, qual, new in rows:
            m = re.fullmatch(r"([\w.]+)\((\w+)\)", qual)
            if m and kind == "parameter" and m[2] != new:
                entries.append((file, m[1], m[2], new))
        rename_parameters(project, entries)
        print("parameters", len(entries))
    lsp = []
    members = defaultdict(dict)
    for kind, file, qual, new in rows:
        if (
            kind in ("method", "attribute", "constant", "field", "function", "variable")
            and "." in qual
            and "(" not in qual
            and file in project.files
        ):
            cls, old = qual.rsplit(".", 1)
            if old != new:
                members[old][(file, cls)] = new
    everywhere = {}
    for old, es in members.items():
        news = set(es.values())
        classes = seen_defs.get(old, set())
        named = {(f, c.split(".")[-1]) for f, c in es}
        if (
            len(news) == 1
            and classes <= named
            and old not in COMMON
            and all(
                (
                    find_def(project.files[f].tree.body, c.split(".")) is not None
                    and isinstance(find_def(project.files[f].tree.body, c.split(".")), ast.ClassDef)
                )
                for f, c in es
            )
        ):
            everywhere[old] = next(iter(news))
        else:
            lsp += [(f, c, old, new) for (f, c), new in es.items()]
    # Private members, by file: that of the class, and those that import from it and use the name.
    private = defaultdict(dict)
    for old in {entry[2] for entry in lsp if entry[2].startswith("_")}:
        defining = {path for path, _ in seen_defs.get(old, ())}
        pattern = re.compile(r"\.%s\b" % re.escape(old))
        for path in {f for f, _ in members[old]}:
            news = {new for (f, c), new in members[old].items() if f == path}
            named = {c.split(".")[-1] for f, c in members[old] if f == path}
            if len(news) != 1 or not {c for f, c in seen_defs.get(old, ()) if f == path} <= named:
                continue
            module = project.files[path].module
            users = [
                f.path
                for f in project.files.values()
                if f.path not in defining
                and pattern.search(f.text)
                and any(isinstance(n, ast.ImportFrom) and resolve_from(f, n) == module for n in ast.walk(f.tree))
            ]
            if all(private[user].get(old, next(iter(news))) in news for user in users):
                for user in [path, *users]:
                    private[user][old] = next(iter(news))
                lsp = [e for e in lsp if (e[0], e[2]) != (path, old)]
    if "members" in only:
        for path, names in private.items():
            rename_members_everywhere(project, names, [path])
        rename_members_everywhere(project, everywhere)
    if "text" in only:
        text_table.update({o: n for o, n in everywhere.items() if is_distinctive(o)})
    print("members", len(everywhere), "lsp", len(lsp), "text", len(text_table))
    if "--dry" in sys.argv:
        return
    new_class = {(f, q): n for k, f, q, n in rows if k in ("class", "exception")}
    print("files changed", project.save())
    if "text" in only:
        rename_in_text(doc_files(), code_files(), text_table)
    if "lsp" in only and "--no-lsp" not in sys.argv:
        server = Lsp()
        time.sleep(60)
        begin = time.time()
        for i, (file, cls, old, new) in enumerate(lsp):
            f = File(file)
            parts = [new_class.get((file, x), x) for x in cls.split(".")]
            fn = {q: n for k, fi, q, n in rows if fi == file and k == "function"}
            pos = (
                member_position(f, parts, old)
                or member_position(f, [fn.get(x, x) for x in parts], old)
                or member_position(f, cls.split("."), old)
            )
            if pos is None:
                print("NOPOS", file, cls, old, new, flush=True)
                continue
            try:
                n = server.rename(file, pos, new)
            except Exception as e:
                n = f"ERR {e!r}"
            print("lsp", i, len(lsp), round(time.time() - begin), file, cls, old, new, n, flush=True)
        server.p.terminate()


if __name__ == "__main__":
    main()
