"""stub"""
from strata.backends.llvm.builder import suffix
class Math:
    def __init__(self,f,type_,target): self.f=f; self.type=type_; self.target=target
def exp(m,x): return m.f.intrinsic("exp",m.type,x)
def __getattr__(name): 
    if name.startswith("__"): raise AttributeError(name)
    return lambda m,*a: m.f.intrinsic(name,m.type,*a)
