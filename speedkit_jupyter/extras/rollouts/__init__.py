"""An operator applied to its own result many times: how, how fast, and how far it drifts."""
