"""Generation backends: samplers of completions. Importing this package imports no engine."""
