"""Translation: HTTP, CLI, settings, chat templates, tool-call text, SSE, metrics."""
