"""--apply: the plan that tuning has learned is in force at once, what it finds at the end."""

from __future__ import annotations

from typing import Any

from IPython.display import display

from speedkit_jupyter.codegen.training_loop import Words
from speedkit_jupyter.magics.namespace import inside_others, models, optimizers
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.report.plan_report import applied_report
from speedkit_jupyter.session import Session
from speedkit_jupyter.tuning.search import Search


class Applied:
    """Around a search: `settle()` at its end keeps what holds; whatever is raised, nothing does.

    Without a search it does nothing.
    """

    def __init__(self, shell: Any, session: Session, search: Search | None) -> None:
        self._shell, self._session, self._search = shell, session, search
        self._contexts: list[SpeedContext] = []
        self._settled = False

    def __enter__(self) -> Applied:
        __tracebackhide__ = True
        if self._search is not None and self._search.recall().helped:
            self._apply()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._settled:
            self._restore()

    def settle(self) -> None:
        """Apply what was found; the learned plan stays in force where it held."""
        self._settled = True
        if self._search is None:
            return
        tuning = self._search.result()
        if self._contexts and tuning.learned is not None and tuning.confirmed:
            return
        self._restore()
        if tuning.helped:
            self._apply()

    def _apply(self) -> None:
        assert self._search is not None
        tuning, names = self._search.result(), self._shell.user_ns
        self._contexts = tuning.put_in_force()
        for number, context in enumerate(self._contexts):
            every = models(names) | inside_others(names)
            name = _name(every, context.model) or f"model_{number + 1}"
            listing = optimizers(names)
            held = {_name(listing, optimizer): optimizer for optimizer in context.target.optimizers}
            named = {
                n or f"optimizer_{i}": optimizer for i, (n, optimizer) in enumerate(held.items(), 1)
            }
            ctx = self._session.keep(name, context)
            display(applied_report(context, Words(name, named, ctx, names)))

    def _restore(self) -> None:
        for context in self._contexts:
            context.restore()
        self._contexts = []


def _name(known: dict[str, Any], value: Any) -> str | None:
    return next((name for name, candidate in known.items() if candidate is value), None)
