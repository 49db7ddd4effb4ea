"""Checking a rewrite: does it compute the same as its reference, and how fast?"""
