"""Arithmetic: one model on one device (weights, pages, slab, attention, one step, copies)."""
