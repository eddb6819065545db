"""Where completions come from. Importing this package imports no engine."""
