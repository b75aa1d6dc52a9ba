"""Native code: C and C++ files, compiled on the machine that runs them, loaded by ctypes.

Everything here can do without.

`build` knows compilers and the cache of libraries, nothing of what they do. Each user (`blocks`, `decoder`) declares
its functions, and has a slower way in Python for machines without a compiler.
"""
