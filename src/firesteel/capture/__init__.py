"""Capture: Python bytecode to graphs, guards and continuations.  It needs NumPy, whose arrays programs may hold."""
from firesteel import support

support.check_numpy()
