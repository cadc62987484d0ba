"""strip_sections.py ROOT PATH... : remove Raises (all) and Args/Returns (underscore functions) sections of docstrings outside the public surface."""
import ast, re, sys
from pathlib import Path
ROOT = Path(sys.argv[1])
public = set()
for stub in (ROOT/'core/meshwright/__init__.py', ROOT/'core/meshwright/plugin.pyi', ROOT/'core/meshwright/__init__.pyi'):
    if stub.is_file():
        for n in ast.walk(ast.parse(stub.read_text())):
            if isinstance(n, ast.ImportFrom):
                for a in n.names: public.add(a.asname or a.name)
saved = 0
def strip(doc_lines, sections):
    out, skip, i = [], None, 0
    for l in doc_lines:
        s = l.strip(); ind = len(l) - len(l.lstrip())
        if s in ('Args:', 'Raises:', 'Returns:', 'Attributes:', 'Yields:'):
            skip = ind if s in sections else None
            if skip is not None:
                while out and not out[-1].strip(): out.pop()
                continue
        elif skip is not None:
            if not s or ind > skip: continue
            skip = None
            out.append('')
        out.append(l)
    return out
for arg in sys.argv[2:]:
    for f in sorted(Path(arg).rglob('*.py')):
        if '/testing/' in f.as_posix(): continue
        text = f.read_text(); tree = ast.parse(text); lines = text.splitlines()
        edits = []
        def visit(node, pub):
            for n in ast.iter_child_nodes(node):
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    own = pub if isinstance(node, ast.ClassDef) else n.name in public
                    is_pub = own and not n.name.startswith('_') or (own and n.name == '__init__')
                    d = n.body[0] if n.body else None
                    if isinstance(d, ast.Expr) and isinstance(d.value, ast.Constant) and isinstance(d.value.value, str) and not isinstance(n, ast.ClassDef) and not is_pub and d.end_lineno > d.lineno:
                        sections = {'Raises:'} | ({'Args:', 'Returns:'} if n.name.startswith('_') and n.name != '__init__' else set())
                        edits.append((d.lineno, d.end_lineno, sections))
                    visit(n, is_pub)
                else: visit(n, pub)
        visit(tree, False)
        before = len(lines)
        for a, b, sections in sorted(edits, reverse=True):
            block = lines[a-1:b]
            last = block[-1].strip()
            body = block[:-1] if last == '"""' else block[:-1] + [block[-1].rstrip()[:-3]]
            new = strip(body, sections)
            if new == body: continue
            while new and not new[-1].strip(): new.pop()
            ind = re.match(r' *', block[0])[0]
            if len(new) == 1 and len(new[0]) + 3 <= 120: new = [new[0] + '"""']
            else: new.append(ind + '"""')
            lines[a-1:b] = new
        if len(lines) != before:
            saved += before - len(lines); f.write_text('\n'.join(lines) + '\n')
print('saved', saved)
