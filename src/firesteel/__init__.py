"""firesteel: a compiler for PyTorch programs."""
