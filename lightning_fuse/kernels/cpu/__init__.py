"""The CPU kernel: C++ in ``src/``, built once per CPU level, called through ctypes with tables of pointers.

``library.py`` finds and loads what was built, ``tables.py`` writes the rows that both languages know, ``plan.py`` keeps
them from step to step, ``native.py`` is the kernel. Nothing is loaded before an optimizer asks what it supports.
"""
