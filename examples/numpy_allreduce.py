"""The first thing to try: every process contributes an array and gets the average.

    hvrun -np 2 python examples/numpy_allreduce.py
    hvrun -np 4 -H node1:2,node2:2 python examples/numpy_allreduce.py
    python examples/numpy_allreduce.py                    # one process, no launcher

On two processes it prints

    [0] rank 0 of 2: I had [0. 1. 2.], the average is [5. 6. 7.]
    [1] rank 1 of 2: I had [10. 11. 12.], the average is [5. 6. 7.]
"""

import numpy as np

import hvlite as hvd

hvd.init()
mine = np.arange(3.0) + 10 * hvd.rank()
average = hvd.allreduce(mine, name="mine")
print(f"rank {hvd.rank()} of {hvd.size()}: I had {mine}, the average is {average}")
