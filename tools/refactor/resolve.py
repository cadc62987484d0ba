import ast,sys
from pathlib import Path
ROOT=Path(sys.argv[1]); PK={'meshwright':ROOT/'core/meshwright'}
for p in ROOT.glob('plugins/*/src/*'):
    if p.is_dir() and (p/'__init__.py').exists(): PK[p.name]=p
PK['support']=ROOT/'tests/support'
def find(mod):
    t,*r=mod.split('.'); b=PK[t].joinpath(*r)
    if b.with_suffix('.py').is_file() and r: return b.with_suffix('.py')
    if (b/'__init__.py').is_file(): return b/'__init__.py'
    if b.is_dir(): return b
cache={}
def names(f):
    if f.is_dir(): return set()
    if f not in cache:
        s=set()
        t=ast.parse(f.read_text())
        for n in ast.walk(t):
            if isinstance(n,(ast.FunctionDef,ast.ClassDef,ast.AsyncFunctionDef)): s.add(n.name)
            elif isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store): s.add(n.id)
            elif isinstance(n,(ast.ImportFrom,ast.Import)):
                for a in n.names: s.add((a.asname or a.name).split('.')[0])
            elif isinstance(n,ast.Constant) and isinstance(n.value,str) and n.value.isidentifier(): s.add(n.value)
        cache[f]=s
    return cache[f]
bad=0
for f in [*ROOT.glob('core/**/*.py'),*ROOT.glob('plugins/**/*.py'),*ROOT.glob('tests/**/*.py'),*ROOT.glob('tools/**/*.py'),*ROOT.glob('benchmarks/**/*.py'),*ROOT.glob('examples/**/*.py')]:
    if 'build/' in str(f): continue
    top=next((k for k,b in PK.items() if b in f.parents),None)
    try: t=ast.parse(f.read_text())
    except SyntaxError as e: print('SYNTAX',f,e); continue
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom):
            if n.level:
                if not top: continue
                parts=[top,*f.relative_to(PK[top]).with_suffix('').parts]
                if parts[-1]=='__init__': pkg=parts[:-1]
                else: pkg=parts[:-1]
                pkg=pkg[:len(pkg)-n.level+1]; full='.'.join(pkg+([n.module] if n.module else []))
            else: full=n.module or ''
            if full.split('.')[0] not in PK: continue
            m=find(full)
            if m is None: print(f'{f.relative_to(ROOT)}:{n.lineno}: no module {full}'); bad+=1; continue
            for a in n.names:
                if a.name!='*' and a.name not in names(m) and find(f'{full}.{a.name}') is None:
                    print(f'{f.relative_to(ROOT)}:{n.lineno}: {full} has no {a.name}'); bad+=1
print(bad)
