"""One thread for all tests: the tensors are small, and spinning threads on a shared machine cost more than they save."""

import torch

torch.set_num_threads(1)
