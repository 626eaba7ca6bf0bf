"""Folders in object stores: written from this machine, one owner at a time."""
