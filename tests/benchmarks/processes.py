"""Measure how far a plan's gain differs between fresh processes.

Runs six processes for each of six workloads, in about 8 minutes. Prints each gain, and the standard
deviation of the gains' logarithms as a share of their mean. `PROCESSES` in
`speedkit_jupyter/rounds/statistics.py` is between these shares' median and root mean square.
"""

import math
import statistics
import sys

from _program import Row, collected, parser_of, product
from _side_by_side import in_fresh_process

PROCESSES = 6
PLANS = {
    "tiny MLP, training": {"threads": 1, "fused_optimizer": True},
    "CNN, training": {"precision": "bf16", "fused_optimizer": True},
    "Linear(2048) × 3, training": {"precision": "bf16", "fused_optimizer": True},
    "transformer, training": {"gemm": "onednn", "fused_optimizer": True},
    "large MLP, training": {"precision": "bf16", "fused_optimizer": True},
    "CNN, inference": {"precision": "bf16", "channels_last": True, "inference": True},
}


def main() -> int:
    options = parser_of(__doc__, "processes.jsonl").parse_args()
    rows = collected(options, product(workload=PLANS), measured, str)
    shares = [row["share"] for row in rows]
    mean_square = math.hypot(*shares) / math.sqrt(len(shares))
    print(f"median {statistics.median(shares):.3f}, root mean square {mean_square:.3f}")
    return 0


def measured(workload: str) -> Row:
    plan = PLANS[workload]
    logs = [math.log(in_fresh_process(workload, plan)[0]) for _ in range(PROCESSES)]
    share = statistics.stdev(logs) / statistics.mean(logs)
    return {"gains": [math.exp(one) for one in logs], "share": share}


if __name__ == "__main__":
    sys.exit(main())
