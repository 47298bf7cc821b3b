"""Kernel tests share two cores with others: one torch thread is quickest for their small tensors."""

import torch

torch.set_num_threads(1)
