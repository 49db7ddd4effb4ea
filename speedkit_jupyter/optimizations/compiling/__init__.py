"""Parts of `compile`: the calls of compiled modules, their code, what their builds leave behind."""
