"""One thread for everybody's arithmetic, in this process and in the servers that tests start.

The tests run side by side on few cores and compute on tiny tensors: with more threads each, the
threads wait for each other most of the time (18 times slower was measured).
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
