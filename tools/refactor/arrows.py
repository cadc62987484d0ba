import ast,sys,collections
from pathlib import Path
ROOT=Path(sys.argv[1]); 
def mods(base,name):
    out={}
    for p in base.rglob('*.py'):
        parts=list(p.relative_to(base).with_suffix('').parts)
        if parts[-1]=='__init__': parts.pop()
        out['.'.join([name,*parts])]=p
    return out
M={}
for p in [ROOT/'core/meshwright',*ROOT.glob('plugins/*/src/*')]:
    if (p/'__init__.py').exists(): M|=mods(p,p.name)
def imports(m):
    p=M[m]; t=ast.parse(p.read_text()); ispkg=p.name=='__init__.py'
    tc=set(); 
    for n in ast.walk(t):
        if isinstance(n,ast.If) and 'TYPE_CHECKING' in ast.unparse(n.test):
            for x in n.body: tc|={id(y) for y in ast.walk(x)}
    infn=set()
    for n in ast.walk(t):
        if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef)):
            for y in ast.walk(n): infn.add(id(y))
    for n in ast.walk(t):
        kind='type' if id(n) in tc else 'lazy' if id(n) in infn else 'top'
        if isinstance(n,ast.ImportFrom):
            if n.level:
                pk=m.split('.') if ispkg else m.split('.')[:-1]
                pk=pk[:len(pk)-n.level+1]; full='.'.join(pk+([n.module] if n.module else []))
            else: full=n.module or ''
            if full.split('.')[0].startswith('meshwright'):
                for a in n.names:
                    sub=f'{full}.{a.name}'
                    yield (sub,None,kind,n.lineno) if sub in M else (full,a.name,kind,n.lineno)
        elif isinstance(n,ast.Import):
            for a in n.names:
                if a.name.split('.')[0].startswith('meshwright'): yield a.name,None,kind,n.lineno
