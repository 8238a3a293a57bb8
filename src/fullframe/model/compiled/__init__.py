"""Blocks of a split model captured through their rules, and compiled by torch's inductor."""
