"""What plans change on objects: wishes in layers beside them, taken back in any order."""
