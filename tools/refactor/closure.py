"""closure.py ROOT MODULE[:lazy]... : static closure of top-level imports (TYPE_CHECKING and in-function imports excluded)."""
import sys
args=sys.argv[1:]; sys.argv=['x',args[0]]; exec((__import__('pathlib').Path(__file__).parent / 'arrows.py').read_text())
def lines(m): return len(M[m].read_text().splitlines())
def parents(m):
    p=m.split('.'); return ['.'.join(p[:i]) for i in range(1,len(p))]
def closure(start,kinds=('top',)):
    seen=set(); todo=list(start)
    while todo:
        m=todo.pop()
        if m in seen or m not in M: continue
        seen.add(m)
        for q in parents(m): 
            if q not in seen: todo.append(q)
        for t,n,k,l in imports(m):
            if k in kinds: todo.append(t)
    return seen
if __name__=='__main__' and len(args)>1:
    c=closure(args[1:]); print(len(c),sum(map(lines,c)))
    r=collections.Counter()
    for m in c: r['.'.join(m.split('.')[:2])]+=lines(m)
    print(r)
