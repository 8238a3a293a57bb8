"""Devices and links: published figures, and this machine measured."""
