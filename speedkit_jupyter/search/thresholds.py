"""The thresholds of a search. SAME, the band of equal speed, is in `rounds.statistics`."""

from __future__ import annotations

from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.rounds.statistics import SAME

# Speed-ups. A plan is chosen only if its proven speed-up is above 1.

# A part that lowers precision, or compiles for seconds at every start, must bring this gain.
LEAST_COSTLY_PART_GAIN = 1.02
# Every other part must bring this gain.
LEAST_PART_GAIN = 1 + SAME
# If the intervals of all plans end below this speed-up, there is nothing to gain.
LEAST_WORTH_FINDING = 1.03
# A plan at this share of the best speed may still be the best: medians of three rounds are off by
# about 2 %. Compiling the blocks of a ViT gave a speed-up of 0.976, and compiling all of it 1.04.
MAY_BE_BEST = 0.93

# When a plan is dropped.

# A plan that takes over this many times as long as the baseline in warm-up is not timed.
MOST_TIMES_SLOWER = 3.0
# A plan that takes over this many times as long as the fastest is dropped despite noise.
CLEARLY_SLOWER = 1.25
# Fewest rounds to drop a plan, or call it likely: one disturbed round hardly moves their median.
FEW_ROUNDS = 3
# After FEW_ROUNDS, a plan is dropped if it is slower than the fastest by this many standard errors
# of the median, and by SAME.
CLEAR_ERRORS = 3.0
# Before 2 * FEW_ROUNDS rounds, plans are dropped only if the times per step of all plans and rounds
# sum to these seconds. Otherwise a short disturbance could decide.
LEAST_RACE_S = 0.03

# The budget.

# Most races in a row (suggested plans, then variations of the best plan), and most plans per race.
MOST_RACES = 3
MOST_CANDIDATES = 5
# Shares of the budget: a race takes RACE_SHARE at most, and leaves PROOF_SHARE or more for a proof.
# Variations of a compiled plan are compiled only if its first call took at most RACE_SHARE.
RACE_SHARE = 0.25
PROOF_SHARE = 0.3
# A default budget has time for ENOUGH_STEPS steps. A proof takes about ENOUGH_ROUNDS rounds.
ENOUGH_STEPS, ENOUGH_ROUNDS = 60, 10
# Estimates: a plan's time ÷ the baseline's time, and a plan's time in a race ÷ the time of a proof.
PLAN_SHARE, CANDIDATE_SHARE = 0.5, 0.125
# Largest default budget in seconds, for long steps.
MOST_GROWN_S = 900.0
# Seconds for compiling a small network. If the user gives a shorter budget, nothing is compiled.
LEAST_COMPILING_S = 20.0
# Only blocks are compiled if compiling the whole model would take longer than both the budget and
# this limit in seconds.
MOST_WHOLE_S = 3 * DEFAULT_BUDGET_S

# The proof.

# A proof may end once the interval is within ± this share, or ± the variation between processes.
PRECISE_PLAN = 0.08
# A part's ratio is precise enough with an interval of ± this share: a choice by the median is then
# wrong by at most this share.
PRECISE_PART = 0.05
# After this many rounds, an interval of ± twice PRECISE_PLAN is enough. Unclear plans prolong the
# proof only if they may gain LEAST_WORTH_FINDING and over UNCLEAR_SHARE of the budget is left. Of
# simulated proofs with a part that gains 5 % and blocks that scatter by 6 %, 13 % lost the part
# after 15 rounds, and 3 % with this rule.
MOST_UNCLEAR_ROUNDS, UNCLEAR_SHARE = 15, 0.3
