"""Scepticism: agent workloads against any OpenAI-compatible URL."""
