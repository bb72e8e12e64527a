"""What the compiler knows of ATen operators, a family in each file; importing this writes every row.  `block.py` says how a row is written."""
import importlib
import pkgutil

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
