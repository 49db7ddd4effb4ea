"""Compare a tuned `generate()` with a static cache and torch.compile by hand.

A GPT-2-like model with random weights writes 64 tokens after a prompt of 16, greedily. One copy is
plain. One is compiled by hand with `cache_implementation="static"`, as in transformers' guide. One
has the plan that `tune` proves or finds likely. They run interleaved in shuffled rounds, and their
tokens are compared. The time of a token does not include the prompt.
Exits 1 if the interval of the tuned call's speed is entirely below 1.5 times the plain call's speed
or below 0.97 of the speed by hand, or if a token differs.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from _nets import untrained
from _program import Row, collected, parser_of, product
from _tables import interval, reported
from _timing import interleaved_s, over

from speedkit_jupyter import benchmark, tune
from speedkit_jupyter.support import units

ROWS, PROMPT, NEW, WORDS = (1, 4), 16, 64, 2000
AT_LEAST, AS_BY_HAND = 1.5, 0.97
HEAD = ("rows", "plain", "over plain: by hand", "tuned", "a token: plain", "tuned", "plan")


def main() -> int:
    options = parser_of(__doc__, "generate.jsonl", rounds=15, budget=60.0).parse_args()
    work = partial(measured, rounds=options.rounds, budget_s=options.budget)
    return reported(collected(options, product(rows=ROWS), work, cells), HEAD, cells, promises)


def promises(row: Row) -> dict[str, bool]:
    return {
        "other tokens": row["equal"],
        f"less than {AT_LEAST}× of plain": row["tuned"][2] >= AT_LEAST,
        "slower than by hand": row["over_hand"][2] >= AS_BY_HAND,
    }


def measured(rows: int, rounds: int, budget_s: float) -> Row:
    """Return seconds and relative speeds, a token's seconds, and whether all tokens agree."""
    plain = model()
    prompt = torch.randint(0, WORDS, (rows, PROMPT))
    tuned, hand = copy.deepcopy(plain), copy.deepcopy(plain)
    found = tune(partial(step, tuned, prompt), model=tuned, budget_s=budget_s, fresh=True)
    found.apply(likely=True)
    ways: dict[str, Callable[[], Any]] = {
        "plain": partial(step, plain, prompt),
        "hand": partial(step, hand, prompt, **by_hand()),
        "tuned": partial(step, tuned, prompt),
    }
    tokens = {name: way() for name, way in ways.items()}
    times = interleaved_s(ways, rounds)
    compared = benchmark(ways["tuned"], "baseline,current", model=tuned, budget_s=budget_s)
    token_s = {one.name: one.tokens and one.tokens.token_s for one in compared.records}
    return {
        "plan": found.winner.name if found.helped else f"likely: {found.likely or 'none'}",
        "seconds": {name: median(one) for name, one in times.items()},
        "hand": over(times["plain"], times["hand"]),
        "tuned": over(times["plain"], times["tuned"]),
        "over_hand": over(times["hand"], times["tuned"]),
        "token_s": token_s,
        "equal": all(torch.equal(tokens["plain"], one) for one in tokens.values()),
    }


def model() -> Any:
    sizes = {"n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 256, "vocab_size": WORDS}
    ends = {"bos_token_id": 0, "eos_token_id": None}
    return untrained("GPT2", "GPT2LMHeadModel", sizes | ends).eval()


def by_hand() -> dict[str, Any]:
    from transformers import CompileConfig

    compiling = CompileConfig(mode="default")
    compiling._compile_all_devices = True  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": compiling}


def step(net: Any, prompt: torch.Tensor, **more: Any) -> Any:
    return net.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **more)


def cells(row: Row) -> list[str]:
    seconds = (row["seconds"]["plain"], *row["token_s"].values())
    plain, *tokens = (units.seconds(one) if one else "–" for one in seconds)
    return [str(row["rows"]), plain, interval(row["hand"]), interval(row["tuned"]), *tokens,
            row["plan"]]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
