"""Fixtures shared by all tests."""

import torch

# small tensors: threads cost more than they bring
torch.set_num_threads(1)
