"""What plans change on objects: overrides in layers, which are taken back in any order."""
