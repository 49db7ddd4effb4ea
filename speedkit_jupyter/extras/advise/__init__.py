"""What to do about a slow step: opportunities with evidence, ranked by what they would gain."""
