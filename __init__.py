"""kvalet: an async agent-serving runtime for many LLM agents on one device."""

__version__ = "0.1.0"
