import ast,sys,tokenize,io
from pathlib import Path
def comp(files):
    t=dict(total=0,doc=0,blank=0,imp=0,comment=0,code=0)
    for f in files:
        s=f.read_text(); L=s.splitlines(); kind=['code']*len(L)
        tree=ast.parse(s)
        for n in ast.walk(tree):
            if isinstance(n,(ast.Import,ast.ImportFrom)):
                for i in range(n.lineno-1,n.end_lineno): kind[i]='imp'
            if isinstance(n,ast.Expr) and isinstance(n.value,ast.Constant) and isinstance(n.value.value,str):
                for i in range(n.lineno-1,n.end_lineno): kind[i]='doc'
        for i,l in enumerate(L):
            if not l.strip() and kind[i]!='doc': kind[i]='blank'
            elif l.strip().startswith('#') and kind[i]=='code': kind[i]='comment'
        t['total']+=len(L)
        for k in kind: t[k]+=1
    return t
if __name__=='__main__':
    for a in sys.argv[1:]:
        fs=[f for f in Path(a).rglob('*.py')]; print(a,len(fs),comp(fs))
