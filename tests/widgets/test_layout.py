"""Where the panel's controls lie."""

from __future__ import annotations

from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.widgets.controls import FIRST, GROUPS, MORE, arranged, every_control


def test_each_further_control_stands_once_below_what_it_does_to_the_numbers():
    made = every_control(lambda path, value: None)
    (accordion,) = (one for one in arranged(made) if hasattr(one, "selected_index"))
    assert accordion.get_title(0) == MORE
    effects = {entry.name: entry.effect for entry in CATALOG}
    of_widget = {id(control.widget): path for path, control in made.items()}
    title, listed = "", []
    for child in accordion.children[0].children:
        path = of_widget.get(id(child))
        if path is None:
            title = child.value
        else:
            listed.append(path)
            assert GROUPS[effects[path.partition(".")[0]]] in title
    first = [path for path, c in made.items() if c.is_first and c.label in FIRST]
    assert sorted([*listed, *first]) == sorted(made)
