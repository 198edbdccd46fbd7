"""Whole models: ``torch.compile(model, backend="qcore_cpu")``, each part of a captured graph as one native program.

May import: every module of `qcore_cpu` below `plugin`. Imported by: nothing; torch finds `backend` by its entry point.
"""
