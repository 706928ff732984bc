"""The ledger: what a training run will keep in memory and move per step, counted before anything is allocated.

``count`` asks the optimizers themselves, built over parameters on the meta device, which have shapes and no memory;
``traffic`` derives what a step reads and writes; ``query`` reads the words of the command, ``tables`` prints.
"""
