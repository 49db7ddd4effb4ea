"""The magics %speedkit and %%speedbench, with their options and displays."""
