"""One thread a test process: the tensors are small, and two processes run side by side."""

import torch

torch.set_num_threads(1)
