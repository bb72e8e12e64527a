"""Without a GPU the kernels run in Triton's interpreter, which must be asked for before Triton is first imported."""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
