"""One thread for all tests: tensors are small, and threads that spin on a shared machine cost more than they save."""

import torch

torch.set_num_threads(1)
