"""One thread for all tests: tensors are small, and threads that spin on a shared machine cost more than they save.

Without a GPU Triton's kernels run in its interpreter, which has to be asked for before they are imported.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
