"""Advice for a slow step: opportunities with evidence, ranked by their expected gain."""
