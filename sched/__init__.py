"""Decisions: who runs next, who leaves, who comes back."""
