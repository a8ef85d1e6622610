"""One torch thread everywhere, as in device processes: the number of threads changes the order of sums."""

import logging

import torch

torch.set_num_threads(1)
logging.getLogger("torch").setLevel(logging.WARNING)
