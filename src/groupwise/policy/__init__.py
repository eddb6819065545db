"""Model in, log-probs out: loading, reference model, layouts and heads."""
