"""%speedkit and %%speedbench: parse, call, display."""
